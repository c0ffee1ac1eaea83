-- Renews a host's lease, unless it has run out. Called every heartbeat; primary key. A late call changes nothing.
update {schema}.host
set heartbeat_at = clock_timestamp(), expires_at = clock_timestamp() + $2 * interval '1 ms', stats = $3
where id = $1 and expires_at > clock_timestamp()
returning id
