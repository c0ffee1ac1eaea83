-- Forgets dead letters for good. $1 their ids. Called by engine::dead; see functions/dead.sql.
select {schema}.discard_dead($1)
