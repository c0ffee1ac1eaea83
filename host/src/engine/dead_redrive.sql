-- Delivers dead letters again, as if for the first time. $1 their ids. One that is on its way again already is left
-- alone, also when two calls run at once: the second waits for the row, and then finds it redriven.
-- The row stays, with redriven_at, until the new delivery ends. Called by engine::dead; primary key.
with open as materialized (
    select id, group_id, message_id, message_key, concurrency from {schema}.dead_letter
    where id = any ($1) and redriven_at is null order by id for update
),
scheduled as (
    -- A message that is under way all the same (its group was sent back to it) is not delivered twice.
    insert into {schema}.exception (group_id, message_id, state, due_at, message_key, concurrency, dead_letter_id)
    select group_id, message_id, 'waiting', clock_timestamp(), message_key, concurrency, id from open order by id
    on conflict (group_id, message_id) do nothing
    returning dead_letter_id
)
update {schema}.dead_letter d set redriven_at = clock_timestamp() from scheduled s where d.id = s.dead_letter_id
