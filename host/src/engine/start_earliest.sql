-- A group begins at the first message there is: its cursor stands before every id that retention has left.
-- Called by engine::position.
select {schema}.log_floor_{stream_id}() as id
