-- Drops what has left the log; see functions/maintain.sql.
select {schema}.drop_detached($1, $2)
