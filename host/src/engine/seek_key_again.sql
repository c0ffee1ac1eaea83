-- Messages of a key that group $1 has passed come again: those of $2 that are still there, and of compacted ones only the
-- winner. $3 is the group's concurrency_override. What a claim holds runs: a second right to deliver it would have its effects
-- twice. What is not due yet waits for its time: in its place if it is ordered. Answers them. Called by engine::seek_key after seek_key_reset.sql; message_log and compaction_head primary keys, claim_group.
insert into {schema}.exception (group_id, message_id, state, due_at, message_key, lane, concurrency, compaction_rank, replay)
select $1, l.id, case when l.mode = 'ordered' then 'deferred' when l.not_before is not null then 'delayed'
        when l.mode = 'parallel' then 'waiting' else 'deferred' end::{schema}.exception_state,
    coalesce(l.not_before, case when l.mode = 'parallel' then clock_timestamp() end), l.message_key, l.lane, l.mode, l.compaction_rank, true
from (
    select id, message_key, lane, compaction_rank, case when deliver_after > clock_timestamp() then deliver_after end as not_before,
        least(concurrency, $3::text::{schema}.concurrency) as mode
    from {schema}.log_rows_{stream_id}($2)
) as l
where not coalesce((
        select range_agg(r.ids) from {schema}.claim k, unnest(k.pending) as r (ids) where k.group_id = $1 and k.id > 0) @> l.id, false)
    and (l.compaction_rank is null or l.id = (
        select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = l.message_key))
order by l.id
on conflict (group_id, message_id) do nothing
returning message_id
