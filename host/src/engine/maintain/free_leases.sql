-- Frees at most $3 keys of group $1 that host $2 has, which does not exist; see functions/maintain.sql.
select {schema}.free_leases($1, $2, $3)
