-- A group begins at a position ($1), or at the first message that retention has left. Called by engine::position.
select greatest($1::bigint - 1, {schema}.log_floor_{stream_id}()) as id
