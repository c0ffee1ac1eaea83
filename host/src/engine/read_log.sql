-- Messages of a log after a position, in id order, without their payloads. $1 position, $2 how many at most.
-- Called by engine::read; message_log primary key.
select id, message_key, routing_key, content_type, octet_length(payload)::bigint as payload_bytes,
    to_char(created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as produced_at,
    (extract(epoch from clock_timestamp() - created_at) * 1000)::bigint as age_ms
from {schema}.message_log_{stream_id}
where id > $1 order by id limit $2
