-- What our role may do about the schema $1: make it, or tables in it; and whether it is called like it, so that `"$user"`
-- in the search_path of its other sessions means our schema. Called by database::rights.
select case when n.oid is null then has_database_privilege(current_database(), 'create')
        else has_schema_privilege(n.oid, 'create') end as may_create,
    current_user::text = $1 as is_namesake
from (select $1::text as name) as asked left join pg_catalog.pg_namespace n on n.nspname = asked.name
