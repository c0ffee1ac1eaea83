-- What our role may do about the schema $1: make it, or tables in it; and whether `"$user"`, which stands first in the usual
-- search_path of its other sessions, means our schema. Called by database::rights.
select case when n.oid is null then has_database_privilege(current_database(), 'create')
        else has_schema_privilege(n.oid, 'create') end as may_create,
    current_user::text = $1 and coalesce(path.setting, '"$user"') like '%$user%' as is_namesake
from (select $1::text as name) as asked
left join pg_catalog.pg_namespace n on n.nspname = asked.name
left join lateral (
    -- Of the role in this database, of the role, of the database: the first that there is.
    select c.setting from pg_catalog.pg_db_role_setting s, unnest(s.setconfig) as c (setting)
    where c.setting like 'search_path=%'
        and s.setdatabase in (0, (select oid from pg_catalog.pg_database where datname = current_database()))
        and s.setrole in (0, (select oid from pg_catalog.pg_roles where rolname = current_user))
    order by s.setrole = 0, s.setdatabase = 0 limit 1
) as path on true
