-- Messages that come again. $1 group, then arrays: message, delay in ms, failures, class, error, digest, dead letter, replay,
-- and of keyed ones concurrency, lane, versions skipped, and whether they go back behind their key as if never begun.
-- Called by engine::settle after the messages were taken out; exception primary key.
insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, lane, concurrency, compaction_rank,
    skipped, dead_letter_id, replay, last_class, last_error, last_digest, failed_at)
select $1, a.message_id, case when a.is_deferred then 'deferred' else 'waiting' end::{schema}.exception_state,
    case when not a.is_deferred then clock_timestamp() + a.delay_ms * interval '1 ms' end, a.failures,
    coalesce(l.message_key, d.message_key), a.lane, a.concurrency::{schema}.concurrency, coalesce(l.compaction_rank, d.compaction_rank),
    a.skipped, a.dead_letter_id, a.replay,
    a.class, a.error, a.digest, case when a.class is not null then clock_timestamp() end
from unnest($2::bigint[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::boolean[],
    $10::text[], $11::smallint[], $12::bigint[], $13::boolean[])
    as a (message_id, delay_ms, failures, class, error, digest, dead_letter_id, replay, concurrency, lane, skipped, is_deferred)
left join {schema}.log_rows_{stream_id}($2::bigint[]) l on l.id = a.message_id
left join {schema}.dead_letter d on d.id = a.dead_letter_id
on conflict (group_id, message_id) do nothing
