-- Streams with something to expire; see functions/maintain.sql.
select {schema}.streams_with_old_idempotency_keys()
