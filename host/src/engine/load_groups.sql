-- Every group with its stream, as last applied. A few rows per group; called at start and when declarations change.
select g.id, g.name, g.stream_id, s.name as stream, g.epoch, g.paused_at is not null as paused, g.policy
from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id
order by g.name
