-- Deletes at most $1 deployments that are not among the last 100 of their group. Called under the step's lock.
delete from {schema}.deployment
where id in (
    select id
    from (select id, row_number() over (partition by group_id order by id desc) as age from {schema}.deployment) as d
    where age > 100 order by id limit $1)
