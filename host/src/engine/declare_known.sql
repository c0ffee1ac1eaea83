-- What is declared already. Called by engine::declare under the declaration lock.
select 'stream' as kind, name, id, policy, null::text as stream from {schema}.stream
union all
select 'group', g.name, g.id, g.policy, s.name from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id
