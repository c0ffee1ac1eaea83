-- Hosts that have keys of a group and do not exist, which there must never be. One index probe for each group of a host:
-- message_key_lease_host, host primary key. Called by engine::maintain::keys.
with recursive held as (
    (select host_id, group_id, message_key from {schema}.message_key_lease where host_id is not null order by host_id, group_id limit 1)
    union all
    select n.host_id, n.group_id, n.message_key
    from held h, lateral (
        select host_id, group_id, message_key from {schema}.message_key_lease
        where host_id is not null and (host_id, group_id) > (h.host_id, h.group_id)
        order by host_id, group_id limit 1
    ) as n
)
select h.host_id, h.group_id, g.name as group_name, h.message_key as example
from held h join {schema}.consumer_group g on g.id = h.group_id
where not exists (select from {schema}.host where id = h.host_id)
