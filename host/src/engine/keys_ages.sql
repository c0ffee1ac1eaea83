-- How old these messages are, in ms: from the log, or from the copy of a dead letter of group $1. $2 messages.
-- Called by engine::keys.
select m.id, (extract(epoch from clock_timestamp() - coalesce(l.created_at, d.produced_at)) * 1000)::bigint as age_ms
from unnest($2::bigint[]) as m (id)
left join {schema}.log_rows_{stream_id}($2) l on l.id = m.id
left join {schema}.dead_letter d on d.group_id = $1 and d.message_id = m.id
