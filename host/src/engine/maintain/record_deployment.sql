-- Notes that a component serves a group now ($1 group, $2 host, $3 digest, $4 what it replaced), unless that is what was noted
-- last: a second host that deploys the same, or a host that starts again, changes nothing. Called under lock_components.sql.
insert into {schema}.deployment (group_id, host_id, digest, replaced)
select g.id, $2, $3, coalesce($4, last.digest)
from {schema}.consumer_group g
left join lateral (select digest from {schema}.deployment where group_id = g.id order by id desc limit 1) as last on true
where g.name = $1 and last.digest is distinct from $3
