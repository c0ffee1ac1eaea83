-- Messages of key $4 among the first $2 of the log after position $1 and up to $3 that group $9 has passed, its filter applied
-- ($5 routing keys, $6 keys, $7 not keys, $8 headers). What lies in an open gap comes by itself, and what waits is reset. There
-- is no index of keys: it reads them all, in steps. Called by engine::seek_key; cursor_gap_group, exception primary key.
select coalesce(max(id), $1) as last, count(*) as rows, coalesce(array_agg(id order by id) filter (
    where id <= $3 and message_key = $4
        and ($5::text[] is null or coalesce(routing_key like any ($5), false))
        and ($6::text[] is null or coalesce(message_key like any ($6), false))
        and ($7::text[] is null or not message_key like any ($7))
        and ($8::jsonb is null or coalesce(headers @> $8, false))
        and not coalesce((select range_agg(missing) from {schema}.cursor_gap where group_id = $9) @> id, false)
        and not exists (select from {schema}.exception e where e.group_id = $9 and e.message_id = id and e.state <> 'running')
    ), '{}') as ids
from {schema}.log_heads_{stream_id}($1, $2)
