-- Deletes at most $1 idempotency keys that are older than their stream's idempotency_ttl. Index: idempotency_key_N_age.
-- Twice at once, and beside a produce that takes an expired key over: rows are locked first, their age is looked at again
-- then, and what somebody else has locked is skipped.
delete from {schema}.idempotency_key_{stream_id} k
using (
    select key from {schema}.idempotency_key_{stream_id}
    where created_at < clock_timestamp() - (select idempotency_ttl_ms from {schema}.stream where id = {stream_id}) * interval '1 ms'
    order by created_at limit $1 for update skip locked
) as old
where k.key = old.key
