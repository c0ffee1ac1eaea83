-- A dead host's deliveries of one group become waiting, each with one failure counted. $1 group, $2 host. Answers those
-- that have used up their attempts ($3): they are dead-lettered in the same transaction.
-- Called by engine::recover after recover_lock.sql; claim_host, exception_host, message_log primary key.
with gone as (
    delete from {schema}.claim where host_id = $2 and group_id = $1 returning pending
),
lost as (
    insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, concurrency, last_class, last_error, failed_at)
    select $1, l.id, 'waiting', clock_timestamp(), 1, l.message_key, l.concurrency, 'host_lost', $4, clock_timestamp()
    from gone, unnest(gone.pending) as r (ids), {schema}.message_log_{stream_id} l
    where l.id >= lower(r.ids) and l.id < upper(r.ids)
    returning message_id, failures, dead_letter_id
),
running as (
    update {schema}.exception
    set state = 'waiting', due_at = clock_timestamp(), failures = failures + 1, host_id = null, claim_id = null,
        last_class = 'host_lost', last_error = $4, failed_at = clock_timestamp()
    where group_id = $1 and host_id = $2 and state = 'running'
    returning message_id, failures, dead_letter_id
)
select message_id, failures, dead_letter_id, failures >= $3 as is_dead from (select * from lost union all select * from running) as r
