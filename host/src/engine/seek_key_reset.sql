-- What waits of key $2 of group $1 after position $3 begins again: from attempt 1, in its place, as a replay. What is not
-- due yet stays so; of an ordered key it waits in its place. Called by engine::seek_key after seek_key_skip.sql.
update {schema}.exception
set failures = 0, replay = true, last_class = null, last_error = null, last_digest = null, failed_at = null,
    state = case
        when concurrency = 'ordered' or concurrency = 'exclusive' and state = 'waiting' then 'deferred'
        else state end,
    due_at = case
        when state <> 'waiting' then due_at
        when concurrency = 'parallel' then clock_timestamp() end
where group_id = $1 and message_key = $2 and message_id > $3 and state <> 'running'
