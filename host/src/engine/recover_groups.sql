-- Groups in which a host holds something. Called by engine::recover; claim, exception_host, message_key_lease_host.
select g.id, g.stream_id, g.policy from {schema}.consumer_group g
where g.id in (
    select group_id from {schema}.claim where host_id = $1
    union select group_id from {schema}.exception where host_id = $1 and state = 'running'
    union select group_id from {schema}.message_key_lease where host_id = $1)
order by g.id
