-- Attaches empty partitions until $2 of them lie ahead; see functions/shared.sql. Called by declare and maintenance.
select {schema}.extend_log($1, $2)
