-- The keys that the database says a host has in a group. Called by engine::reconcile; message_key_lease_host.
select message_key, lane from {schema}.message_key_lease where group_id = $1 and host_id = $2
