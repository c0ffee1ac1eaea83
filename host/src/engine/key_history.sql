-- The newest versions of key $1 that the log still has, $2 at most. Called by engine::keys; message_log_N_versions.
select id, compaction_rank as rank, payload is null as is_tombstone, octet_length(payload)::bigint as payload_bytes,
    concurrency::text as concurrency, to_char(created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as produced_at
from {schema}.message_log_{stream_id}
where message_key = $1 and compaction_rank is not null
order by id desc limit $2
