-- A dead host's deliveries of one group come again, each with one failure counted: at once, or behind their key. $1 group,
-- $2 host. Answers all of them, and which have used up their attempts ($3): those are dead-lettered in the same
-- transaction; but a version that has lost to a newer one just ends, when it is taken. $4 is the error, $5 the group's concurrency_override.
-- Called by engine::recover after recover_lock.sql; claim_host, exception_host, message_log primary key.
with gone as (
    delete from {schema}.claim where host_id = $2 and group_id = $1 returning pending
),
lost as (
    insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, lane, concurrency, compaction_rank,
        last_class, last_error, failed_at)
    select $1, id, case when mode = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        case when mode = 'parallel' then clock_timestamp() end, 1, message_key, lane, mode, compaction_rank, 'host_lost', $4, clock_timestamp()
    from (
        select l.id, l.message_key, l.lane, l.compaction_rank, least(l.concurrency, $5::text::{schema}.concurrency) as mode
        from gone, unnest(gone.pending) as r (ids), {schema}.message_log_{stream_id} l
        where l.id >= lower(r.ids) and l.id < upper(r.ids)
    ) as l
    on conflict (group_id, message_id) do nothing -- it was redriven as well
    returning message_id, failures, dead_letter_id, message_key, lane, concurrency, compaction_rank
),
running as (
    update {schema}.exception
    set state = case when concurrency = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        due_at = case when concurrency = 'parallel' then clock_timestamp() end, failures = failures + 1, host_id = null, claim_id = null,
        last_class = 'host_lost', last_error = $4, failed_at = clock_timestamp()
    where group_id = $1 and host_id = $2 and state = 'running'
    returning message_id, failures, dead_letter_id, message_key, lane, concurrency, compaction_rank
)
select message_id, dead_letter_id, message_key, lane, concurrency::text as concurrency, failures,
    failures >= $3 and (compaction_rank is not null and message_id <> (
        select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = r.message_key)) is not true as is_dead
from (select * from lost union all select * from running) as r
