-- Puts the cursor of a group ($1) at a position ($2): it was just declared and has none, or is sent elsewhere. Called by
-- engine::position, under the declaration lock or the group's; cursor primary key.
with moved as (
    update {schema}.cursor set claimed = $2, begins_after = $2 where group_id = $1 returning group_id
)
insert into {schema}.cursor (group_id, claimed, begins_after) select $1, $2, $2 where not exists (select from moved)
