-- Notes that a partition has left the log; see functions/maintain.sql.
select {schema}.note_detached($1, $2)
