-- Who holds up process $1. Called when a migration waits for a lock. Never a statement's text: it may hold payloads.
select string_agg(
    format(
        'process %s (%s as %s, in a transaction since %s)',
        pid, coalesce(nullif(application_name, ''), 'unnamed'), usename, xact_start
    ),
    ', '
)
from pg_catalog.pg_stat_activity
where pid = any (pg_catalog.pg_blocking_pids($1))
