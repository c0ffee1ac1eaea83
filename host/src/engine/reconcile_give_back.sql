-- Messages that the database says we hold and we know nothing of: the reply to their claim was lost. $1 group, $2 host,
-- $3 claims. They become waiting and due, no attempt counted. Called by engine::reconcile after fence.sql.
with gone as (
    delete from {schema}.claim where id = any ($3) and host_id = $2 and group_id = $1 returning pending
),
unknown as (
    insert into {schema}.exception (group_id, message_id, state, due_at, message_key, concurrency)
    select $1, l.id, 'waiting', clock_timestamp(), l.message_key, l.concurrency
    from gone, unnest(gone.pending) as r (ids), {schema}.message_log_{stream_id} l
    where l.id >= lower(r.ids) and l.id < upper(r.ids)
    returning message_id
),
running as (
    update {schema}.exception set state = 'waiting', due_at = clock_timestamp(), host_id = null, claim_id = null
    where group_id = $1 and host_id = $2 and state = 'running' and claim_id = any ($3)
    returning message_id
)
select count(*) from (select * from unknown union all select * from running) as r
