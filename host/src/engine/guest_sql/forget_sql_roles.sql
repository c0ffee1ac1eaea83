-- Takes away what was prepared for roles that no group names. Called by engine::apply under the declaration lock.
select {schema}.forget_sql_roles()
