-- Which migrations are applied. Called at every start; a handful of rows.
select version, name, checksum from {schema}.migration order by version
