-- Streams that need partitions; see functions/maintain.sql. Called every two seconds by every host.
select {schema}.streams_to_extend($1)
