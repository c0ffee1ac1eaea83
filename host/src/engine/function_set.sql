-- Which version of a set of functions is installed. Called under the declaration lock.
select version, checksum from {schema}.function_set where name = $1
