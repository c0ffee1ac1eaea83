-- Removes a host that holds nothing, once its row is locked. Called at a graceful stop and after recovery; twice changes nothing.
delete from {schema}.host h
where h.id = $1
    and not exists (select from {schema}.claim where host_id = h.id)
    and not exists (select from {schema}.exception where host_id = h.id and state = 'running')
    and not exists (select from {schema}.message_key_lease where host_id = h.id)
returning h.id
