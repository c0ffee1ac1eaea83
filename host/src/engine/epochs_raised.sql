-- Which of these groups are gone, or no longer under the epoch that a host works under. $1 groups, $2 their epochs as the host
-- knows them. One statement for all groups of a host, once a heartbeat. Called by engine::epochs; primary key.
select known.id
from unnest($1::integer[], $2::bigint[]) as known (id, epoch)
left join {schema}.consumer_group g on g.id = known.id
where g.epoch is distinct from known.epoch
