-- Ends the session $1 if the transaction that began at $2 (seconds since 1970, as text) is still its own: by then the process
-- may be gone and its number another's. Called by engine::guest_sql for a delivery that was cut in the middle of a
-- statement; run twice it finds nothing the second time.
select pg_catalog.pg_terminate_backend(pid)
from pg_catalog.pg_stat_activity
where pid = $1 and extract(epoch from xact_start)::text = $2
