-- Passes one lagging group; see functions/maintain.sql.
select group_name, from_id, to_id from {schema}.pass_lagging($1)
