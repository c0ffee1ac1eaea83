-- What a seek leaves of the lanes of key $2 of group $1, of which an operator holds $3; see functions/operate.sql. Called by
-- engine::seek_key.
select {schema}.free_key($1, $2, $3)
