-- One row when the schema $1 is there. Called by the start that makes the bookkeeping, under the migration lock.
select from pg_catalog.pg_namespace where nspname = $1
