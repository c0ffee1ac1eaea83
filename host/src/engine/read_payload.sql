-- One payload, only when somebody asked for it. Called by engine::read; message_log primary key.
select payload from {schema}.message_log_{stream_id} where id = $1
