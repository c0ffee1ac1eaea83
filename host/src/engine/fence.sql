-- Proves inside a transaction that the host's lease is alive, and keeps recovery out until the transaction ends:
-- recovery locks the row FOR UPDATE. First statement of every settle.
select id from {schema}.host where id = $1 and expires_at > clock_timestamp() for key share
