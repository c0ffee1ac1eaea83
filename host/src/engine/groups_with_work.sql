-- Which of these groups have something to do. One statement for all idle groups of a host; see functions/shared.sql.
select {schema}.groups_with_work($1)
