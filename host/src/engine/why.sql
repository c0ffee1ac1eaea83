-- Everything that is known of one message ($2) in one group ($1), as one JSON object. $3 transactions that produce just
-- now, then the group's filter ($4 to $7), and how many messages before it are counted at most ($8).
-- Called by engine::why after bounded_read.sql. A bounded number of rows whatever the sizes: message_log, cursor,
-- exception, compaction_head and message_key_lease primary keys, dead_letter_once, claim_group, cursor_gap_group.
select to_jsonb(known) from (
    select c.claimed, c.begins_after, c.replay_upto, {schema}.log_floor_{stream_id}() as floor, ahead.count as ahead,
        coalesce(pg_sequence_last_value('{schema_text}.message_log_{stream_id}_id'::regclass), 0) as last_id,
        to_char(g.paused_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as paused_at,
        to_jsonb(message) as message, to_jsonb(gap) as gap, to_jsonb(claim) as claim, to_jsonb(exception) as exception,
        to_jsonb(dead) as dead
    from {schema}.consumer_group g
    join {schema}.cursor c on c.group_id = g.id
    cross join lateral (
        select count(*) as count from (
            select from {schema}.message_log_{stream_id} where id > c.claimed and id < $2 order by id limit $8 + 1
        ) as l
    ) as ahead
    left join lateral (
        select l.message_key, case when l.compaction_rank is not null then (
                select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = l.message_key) end as winner,
            ($4::text[] is null or coalesce(l.routing_key like any ($4), false))
                and ($5::text[] is null or coalesce(l.message_key like any ($5), false))
                and ($6::text[] is null or l.message_key is null or not l.message_key like any ($6))
                and ($7::jsonb is null or coalesce(l.headers @> $7, false)) as matches
        from {schema}.message_log_{stream_id} l where l.id = $2
    ) as message on true
    left join lateral (
        -- A prepared transaction has another name than the one it opened the gap under: while there is one, none is decided.
        select o.holders && $3::text[] or exists (select from unnest($3::text[]) as h (name) where h.name like '-1/%') as undecided, (
                select min(h.pid) from unnest(o.holders, o.pids) as h (transaction, pid) where h.transaction = any ($3::text[])
            ) as pid
        from (select missing, holders, pids from {schema}.cursor_gap where group_id = $1 limit 1000) as o
        where o.missing @> $2 limit 1
    ) as gap on true
    left join lateral (
        select h.name as host, h.expires_at > clock_timestamp() as host_alive,
            to_char(k.claimed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as since
        from (select pending, host_id, claimed_at from {schema}.claim where group_id = $1 and id > 0 limit 10000) as k
        join {schema}.host h on h.id = k.host_id
        where k.pending @> $2 limit 1
    ) as claim on true
    left join lateral (
        select e.state::text as state, e.failures, e.last_class as class, e.last_error as error, e.dead_letter_id as redriven_from,
            e.due_at <= clock_timestamp() as is_due,
            to_char(e.due_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as due_at,
            h.name as host, h.expires_at > clock_timestamp() as host_alive,
            k.blocked_by, k.paused_at is not null as key_paused, k.rests as key_rests, key_host.name as key_host,
            (select d.id from {schema}.dead_letter d where d.group_id = $1 and d.message_id = k.blocked_by) as head_dead_letter,
            (select to_char(b.due_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
                from {schema}.exception b where b.group_id = $1 and b.message_id = k.blocked_by) as head_due_at
        from {schema}.exception e
        left join {schema}.host h on h.id = e.host_id
        left join {schema}.message_key_lease k
            on k.group_id = $1 and k.message_key = e.message_key and k.lane = e.lane and e.state = 'deferred'
        left join {schema}.host key_host on key_host.id = k.host_id
        where e.group_id = $1 and e.message_id = $2
    ) as exception on true
    left join lateral (
        select d.id, d.class, d.error, d.attempts, d.message_key, d.replayed_at is not null as is_replayed,
            to_char(d.died_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as died_at,
            to_char(d.redriven_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as redriven_at
        from {schema}.dead_letter d where d.group_id = $1 and d.message_id = $2
    ) as dead on true
    where g.id = $1
) as known
