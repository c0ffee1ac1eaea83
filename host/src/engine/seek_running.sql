-- The same for deliveries of exceptions. Called by engine::seek after seek_claims.sql; exception primary key.
select count(*) from (
    select from {schema}.exception where group_id = $1 and state = 'running' order by message_id for update
) as held
