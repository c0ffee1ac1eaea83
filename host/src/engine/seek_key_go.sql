-- Lets key $2 of group $1 go after a seek that failed, but for the lanes $3; see functions/operate.sql. Called by
-- engine::seek_key.
select {schema}.let_key_go($1, $2, $3)
