-- A group begins at the first message there is: its cursor stands before every id that retention has left.
-- Called by engine::position; cursor primary key.
insert into {schema}.cursor (group_id, claimed, begins_after)
select $1, at.id, at.id from (select {schema}.log_floor_{stream_id}() as id) as at
on conflict (group_id) do update set claimed = excluded.claimed, begins_after = excluded.begins_after
