-- What the living hosts have published about the keys of group $1, a row for each, with the names of the group and its
-- stream; one row without when none has. Called by engine::hot_keys; the host table has one row for each process.
select g.name as group_name, s.name as stream_name, h.hot_keys
from {schema}.consumer_group g
join {schema}.stream s on s.id = g.stream_id
left join lateral (
    select stats #> array['groups', g.name, 'hot_keys'] as hot_keys from {schema}.host
    where expires_at > clock_timestamp() and jsonb_typeof(stats #> array['groups', g.name, 'hot_keys']) = 'object'
) as h on true
where g.id = $1
