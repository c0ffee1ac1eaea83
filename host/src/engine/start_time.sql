-- A group begins at the first message produced at or after a time ($1), else at the end. The cursor stands at the visible
-- message before it: what a running producer may still commit in between is then a hole like any other. Read in one
-- snapshot, with a few index probes (functions/position.sql). Called by engine::position.
select {schema}.position_of_time_{stream_id}($1::timestamptz) as id
