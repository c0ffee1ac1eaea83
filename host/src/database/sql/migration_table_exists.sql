-- One row when the bookkeeping of migrations is there; $1 is the schema. Called first by every start; reads only.
select
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
where namespace.nspname = $1 and class.relname = 'migration'
