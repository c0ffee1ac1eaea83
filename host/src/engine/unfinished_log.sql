-- Whether anything visible stands after a cursor. Called by `up --drain`; message_log primary key.
select {schema}.has_work_{stream_id}($1)
