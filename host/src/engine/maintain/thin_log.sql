-- Thins one partition of stream $1 by at most $2 rows; see functions/maintain.sql.
select {schema}.thin_log($1, $2)
