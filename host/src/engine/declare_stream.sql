-- Declares a stream, or changes its policy. Called by engine::declare under the declaration lock.
insert into {schema}.stream (name, retention_ms, idempotency_ttl_ms, max_payload_bytes, partition_rows,
    dead_letter_retention_ms, tombstone_retention_ms, max_lag_ms, policy)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
on conflict (name) do update set retention_ms = excluded.retention_ms, idempotency_ttl_ms = excluded.idempotency_ttl_ms,
    max_payload_bytes = excluded.max_payload_bytes, partition_rows = excluded.partition_rows,
    dead_letter_retention_ms = excluded.dead_letter_retention_ms, tombstone_retention_ms = excluded.tombstone_retention_ms,
    max_lag_ms = excluded.max_lag_ms, policy = excluded.policy
returning id
