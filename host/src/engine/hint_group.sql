-- Tells all hosts to look at a group: they wake the groups of its stream. Called after the commit by engine::pause.
select pg_notify($1, s.name)
from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id
where g.id = $2
