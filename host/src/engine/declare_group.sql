-- Declares a group, or changes its policy; its stream never changes. Called by engine::declare under the declaration lock.
insert into {schema}.consumer_group (name, stream_id, handler, policy)
select $1, s.id, $3, $4 from {schema}.stream s where s.name = $2
on conflict (name) do update set handler = excluded.handler, policy = excluded.policy
returning id, stream_id
