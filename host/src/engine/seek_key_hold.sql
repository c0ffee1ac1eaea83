-- Holds key $2 of group $1 for a seek; see functions/operate.sql. Called by engine::seek_key.
select {schema}.hold_key($1, $2)::text
