-- A group begins at the first message there is: its cursor stands before every id that retention has left.
-- Called by engine::position; cursor primary key.
insert into {schema}.cursor as c (group_id, claimed) values ($1, {schema}.log_floor_{stream_id}())
on conflict (group_id) do update set claimed = excluded.claimed
