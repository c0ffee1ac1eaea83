-- A new identity for a process. Called at its start and after it lost the one before.
insert into {schema}.host (name, version, expires_at, sessions)
values ($1, $2, clock_timestamp() + $3 * interval '1 ms', $4)
returning id
