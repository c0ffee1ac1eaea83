-- Releases key $2 of group $1. Called by engine::keys; see functions/operate.sql.
select {schema}.release_key($1, $2)
