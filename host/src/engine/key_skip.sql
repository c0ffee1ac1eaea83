-- Lets key $2 of group $1 go on without its head. Called by engine::keys; see functions/operate.sql.
select message_id, failures, digest, concurrency, lane, dead_letter_id, is_dead from {schema}.skip_key($1, $2)
