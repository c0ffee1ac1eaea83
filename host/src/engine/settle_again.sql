-- Messages that come again. $1 group, then arrays: message, delay in ms, failures, class, error, digest, dead letter, replay.
-- Called by engine::settle after the messages were taken out; exception primary key.
insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, concurrency, dead_letter_id, replay,
    last_class, last_error, last_digest, failed_at)
select $1, a.message_id, 'waiting', clock_timestamp() + a.delay_ms * interval '1 ms', a.failures, coalesce(l.message_key, d.message_key),
    coalesce(l.concurrency, d.concurrency, 'parallel'), a.dead_letter_id, a.replay,
    a.class, a.error, a.digest, case when a.class is not null then clock_timestamp() end
from unnest($2::bigint[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::boolean[])
    as a (message_id, delay_ms, failures, class, error, digest, dead_letter_id, replay)
left join {schema}.log_rows_{stream_id}($2::bigint[]) l on l.id = a.message_id
left join {schema}.dead_letter d on d.id = a.dead_letter_id
