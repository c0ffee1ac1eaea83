-- Marks the dead letters of a group ($1) whose messages it meets again, since it was sent back before them. They stay.
-- Called by engine::seek after the cursor is placed; cursor primary key, dead_letter_once.
update {schema}.dead_letter d set replayed_at = clock_timestamp()
from {schema}.cursor c
where c.group_id = $1 and d.group_id = $1 and d.message_id > c.claimed
