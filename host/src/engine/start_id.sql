-- A group begins at a position, or at the first message that retention has left. Called by engine::position; cursor
-- primary key.
insert into {schema}.cursor as c (group_id, claimed) values ($1, greatest($2::bigint - 1, {schema}.log_floor_{stream_id}()))
on conflict (group_id) do update set claimed = excluded.claimed
