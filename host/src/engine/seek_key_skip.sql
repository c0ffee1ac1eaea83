-- Takes out what waits of key $2 of group $1 up to position $3: the key goes on after it. Called by engine::seek_key under
-- the group's lock, when nothing of the key runs; reads the group's exceptions.
delete from {schema}.exception
where group_id = $1 and message_key = $2 and message_id <= $3 and state <> 'running'
returning message_id, failures, last_digest, concurrency::text, lane, dead_letter_id
