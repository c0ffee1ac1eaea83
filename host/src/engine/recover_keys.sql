-- A dead host's keys are ready for any other. $1 group, $2 host. Called by engine::recover as its last statement;
-- message_key_lease_host.
update {schema}.message_key_lease set host_id = null, changed_at = clock_timestamp() where group_id = $1 and host_id = $2
