-- Deletes a group ($1) with all that is its own. Called by engine::forget after the group's locks and seek_clear.sql;
-- primary keys, dead_letter_once.
with leases as (
    delete from {schema}.message_key_lease where group_id = $1
),
claims as (
    delete from {schema}.claim where group_id = $1
),
positions as (
    delete from {schema}.cursor where group_id = $1
),
deployments as (
    delete from {schema}.deployment where group_id = $1
),
dead as (
    delete from {schema}.dead_letter where group_id = $1 returning 1
),
gone as (
    delete from {schema}.consumer_group where id = $1
)
select count(*) as dead_letters from dead
