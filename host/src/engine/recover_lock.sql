-- Proves that a host is dead and keeps it so: waits for settles that began in time, after which every later one finds
-- the lease run out. First statement of every recovery; twice at once, the second waits.
select id from {schema}.host where id = $1 and expires_at <= clock_timestamp() for update
