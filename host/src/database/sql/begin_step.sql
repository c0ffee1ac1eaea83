-- Begins the transaction of one migration: one process at a time. A start on the heels of nine others waits for all of
-- them, so this lock has a longer limit than those of the migration itself, which must not hold up the tables' users.
set local lock_timeout = '60s';
select pg_catalog.pg_advisory_xact_lock({lock_class} + 3, 0);
set local lock_timeout = '2s';
