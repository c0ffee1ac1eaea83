-- Streams to thin; see functions/maintain.sql.
select {schema}.streams_to_thin()
