-- Lets key $2 of group $1 go after a seek that began at $3 and failed; see functions/operate.sql. Called by engine::seek_key.
select {schema}.let_key_go($1, $2, $3::text::timestamptz)
