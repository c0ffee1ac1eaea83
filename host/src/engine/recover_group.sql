-- A dead host's deliveries of one group come again, each with one failure counted: at once, or behind their key. Of an
-- ordered key only the first can have been running, so only that one counts. $1 group, $2 host. Answers all of them, and
-- which have used up their attempts ($3): those are dead-lettered in the same transaction; but a version that has lost to a
-- newer one just ends, when it is taken. $4 is the error, $5 the group's concurrency_override; it may have changed since the
-- claim, so a key may need a lease that it had not.
-- Called by engine::recover after recover_lock_group.sql; claim_group, exception_host, message_log primary key.
with gone as (
    delete from {schema}.claim where host_id = $2 and group_id = $1 and id > 0 returning pending
),
claimed as materialized (
    select l.id as message_id, l.message_key, l.lane, l.compaction_rank, least(l.concurrency, $5::text::{schema}.concurrency) as mode
    from gone, unnest(gone.pending) as r (ids), {schema}.message_log_{stream_id} l
    where l.id >= lower(r.ids) and l.id < upper(r.ids)
),
ran as materialized (
    select message_id, message_key, lane, concurrency as mode from {schema}.exception
    where group_id = $1 and host_id = $2 and state = 'running'
),
counted as materialized (
    select message_id, (mode <> 'ordered' or row_number() over (partition by mode, message_key, lane order by message_id) = 1)::integer
        as failures
    from (select message_id, message_key, lane, mode from claimed union all select * from ran) as held
),
leased as (
    insert into {schema}.message_key_lease as l (group_id, message_key, lane)
    select distinct $1::integer, message_key, lane from claimed where mode <> 'parallel'
    on conflict (group_id, message_key, lane) do update set buries = true where l.rests
),
lost as (
    insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, lane, concurrency, compaction_rank,
        last_class, last_error, failed_at)
    select $1, c.message_id, case when mode = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        case when mode = 'parallel' then clock_timestamp() end, n.failures, message_key, lane, mode, compaction_rank,
        case when n.failures > 0 then 'host_lost' end, case when n.failures > 0 then $4 end,
        case when n.failures > 0 then clock_timestamp() end
    from claimed c join counted n using (message_id)
    on conflict (group_id, message_id) do nothing -- it was redriven as well
    returning message_id, failures, dead_letter_id, message_key, lane, concurrency, compaction_rank
),
running as (
    update {schema}.exception e
    set state = case when concurrency = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        due_at = case when concurrency = 'parallel' then clock_timestamp() end, failures = e.failures + n.failures, host_id = null,
        claim_id = null, last_class = case when n.failures > 0 then 'host_lost' else last_class end,
        last_error = case when n.failures > 0 then $4 else last_error end,
        failed_at = case when n.failures > 0 then clock_timestamp() else failed_at end
    from counted n
    where e.group_id = $1 and e.host_id = $2 and e.state = 'running' and e.message_id = n.message_id
    returning e.message_id, e.failures, dead_letter_id, message_key, lane, concurrency, compaction_rank
)
select message_id, dead_letter_id, message_key, lane, concurrency::text as concurrency, failures,
    failures >= $3 and (compaction_rank is not null and message_id <> (
        select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = r.message_key)) is not true as is_dead
from (select * from lost union all select * from running) as r
