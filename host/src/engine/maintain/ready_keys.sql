-- Makes keys ready that have deferred messages and no lease row; see functions/maintain.sql. $1 group, $2 keys, $3 lanes.
select {schema}.ready_keys($1, $2, $3)
