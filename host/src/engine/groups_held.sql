-- Groups in which a host holds something. Called once a lease; claim, exception_host, message_key_lease_host.
select group_id from {schema}.claim where host_id = $1
union select group_id from {schema}.exception where host_id = $1 and state = 'running'
union select group_id from {schema}.message_key_lease where host_id = $1
