-- A group begins at the first message produced at or after a time, else at the end. The cursor stands at the visible
-- message before it: what a running producer may still commit in between is then a hole like any other. Read in one
-- snapshot, with a few index probes (functions/position.sql). Called by engine::position; cursor primary key.
insert into {schema}.cursor (group_id, claimed, begins_after)
select $1, at.id, at.id from (select {schema}.position_of_time_{stream_id}($2::timestamptz) as id) as at
on conflict (group_id) do update set claimed = excluded.claimed, begins_after = excluded.begins_after
