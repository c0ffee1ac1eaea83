-- What waits of key $2 of group $1 after position $3 begins again: from attempt 1, in its place, as a replay. What is not
-- due yet stays so, a redriven message until its time; of an ordered key it waits in its place. Answers them. Called by
-- engine::seek_key after seek_key_skip.sql.
update {schema}.exception e
set failures = 0, replay = true, last_class = null, last_error = null, last_digest = null, failed_at = null,
    state = case
        when concurrency = 'ordered' or concurrency = 'exclusive' and state = 'waiting' and not_before is null then 'deferred'
        else state end,
    due_at = case
        when state <> 'waiting' then due_at
        when not_before is not null then not_before
        when concurrency = 'parallel' then clock_timestamp() end
from (
    select r.message_id as id, d.deliver_after as not_before
    from {schema}.exception r
    left join {schema}.dead_letter d on d.id = r.dead_letter_id and d.deliver_after > clock_timestamp()
    where r.group_id = $1 and r.message_key = $2 and r.message_id > $3 and r.state <> 'running'
) as waiting
where e.group_id = $1 and e.message_id = waiting.id
returning e.message_id
