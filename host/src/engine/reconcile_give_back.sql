-- Messages that the database says we hold and we know nothing of: the reply to their claim was lost. $1 group, $2 host,
-- $3 claims, $4 the group's concurrency_override. They become waiting and due, or deferred behind their key, no attempt
-- counted. The override may have changed since the claim, so a key may need a lease that it had not.
-- Called by engine::reconcile after fence.sql and recover_lock_group.sql.
with gone as (
    delete from {schema}.claim where id = any ($3) and host_id = $2 and group_id = $1 returning pending
),
claimed as materialized (
    select l.id, l.message_key, l.lane, l.compaction_rank, least(l.concurrency, $4::text::{schema}.concurrency) as mode
    from gone, unnest(gone.pending) as r (ids), {schema}.message_log_{stream_id} l
    where l.id >= lower(r.ids) and l.id < upper(r.ids)
),
leased as (
    insert into {schema}.message_key_lease as l (group_id, message_key, lane)
    select distinct $1::integer, message_key, lane from claimed where mode <> 'parallel'
    on conflict (group_id, message_key, lane) do update set buries = true where l.rests
),
unknown as (
    insert into {schema}.exception (group_id, message_id, state, due_at, message_key, lane, concurrency, compaction_rank)
    select $1, id, case when mode = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        case when mode = 'parallel' then clock_timestamp() end, message_key, lane, mode, compaction_rank
    from claimed
    on conflict (group_id, message_id) do nothing -- it was redriven as well
    returning message_id
),
running as (
    update {schema}.exception
    set state = case when concurrency = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
        due_at = case when concurrency = 'parallel' then clock_timestamp() end, host_id = null, claim_id = null
    where group_id = $1 and host_id = $2 and state = 'running' and claim_id = any ($3)
    returning message_id
)
select count(*) from (select * from unknown union all select * from running) as r
