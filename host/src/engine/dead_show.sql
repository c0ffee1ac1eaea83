-- All of one dead letter but its payload, of which only size and sha256. $1 its id, or $2 and $3 its group and message.
-- Called by engine::dead; primary key, dead_letter_once.
select d.id, g.name as "group", s.name as stream, d.message_id, d.message_key, d.attempts, d.class, d.error,
    to_char(d.died_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as died_at,
    to_char(d.replayed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as replayed_at,
    d.digest, d.deaths, to_char(d.redriven_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as redriven_at,
    d.concurrency::text as concurrency, d.compaction_rank, d.routing_key, coalesce(d.headers, '{}') as headers, d.content_type,
    to_char(d.produced_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as produced_at,
    octet_length(d.payload)::bigint as payload_bytes, encode(sha256(d.payload), 'hex') as payload_sha256
from {schema}.dead_letter d
join {schema}.consumer_group g on g.id = d.group_id
join {schema}.stream s on s.id = d.stream_id
where d.id = $1 or (d.group_id = $2 and d.message_id = $3)
