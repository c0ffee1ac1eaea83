-- Detaches to finish; see functions/maintain.sql.
select stream_id, lower_id from {schema}.half_detached_partitions()
