-- What a seek that began at $3 leaves of the lanes of key $2 of group $1; see functions/operate.sql. Called by engine::seek_key.
select {schema}.free_key($1, $2, $3::text::timestamptz)
