-- Tells all hosts to look at a group: they wake the groups of its stream. Called after the commit by engine::pause, and
-- before it, while the group is still there, by engine::forget.
select pg_notify($1, s.name)
from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id
where g.id = $2
