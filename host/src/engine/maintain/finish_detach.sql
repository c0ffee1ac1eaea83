-- Ends a detach that began; see functions/maintain.sql.
select {schema}.finish_detach($1, $2)
