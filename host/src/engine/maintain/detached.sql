-- Partitions to drop; see functions/maintain.sql.
select stream_id, lower_id from {schema}.detached_partitions()
