-- Takes the lock of one maintenance step ($1, retention: what a seek answers stays in the log while it decides), and then
-- the lock of a group's claims ($2). Waits for both; a waiting lock makes every claim of the group step back. First
-- statement of every seek.
with step as materialized (
    select pg_advisory_xact_lock({lock_class} + 4, $1)
)
select pg_advisory_xact_lock({lock_class} + 1, $2) from (select count(*) from step) as taken
