-- Partitions older than their retention, at most $1 for a stream; see functions/maintain.sql.
select stream_id, stream_name, lower_id, detach, pinned_by from {schema}.old_partitions($1)
