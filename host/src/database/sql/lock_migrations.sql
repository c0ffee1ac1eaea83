-- One process at a time until this transaction ends. Called before the schema is made: `if not exists` alone races on
-- the catalog's unique index when two starts meet.
set local lock_timeout = '60s';
select pg_catalog.pg_advisory_xact_lock({lock_class} + 3, 0);
