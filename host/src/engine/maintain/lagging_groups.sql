-- Groups that lag longer than max_lag; see functions/maintain.sql.
select {schema}.lagging_groups()
