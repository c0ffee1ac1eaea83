-- Proves inside a transaction that the host's lease is alive, and keeps recovery out until the transaction ends:
-- recovery locks the row FOR UPDATE. A host that is frozen meanwhile keeps it out no longer than its lease, since Postgres
-- then ends its session. First statement of every settle.
select id, pg_catalog.set_config('idle_in_transaction_session_timeout',
    least(greatest(extract(epoch from expires_at - clock_timestamp()) * 1000, 100), 3600000)::integer::text, true)
from {schema}.host where id = $1 and expires_at > clock_timestamp() for key share
