-- What is not at its end, a line each.
select line from (
    select concat_ws(' ', 'claim', id, 'of host', host_id, 'group', group_id, pending::text) as line from {schema}.claim
    union all
    select concat_ws(' ', 'gap', missing::text, 'group', group_id, holders::text) from {schema}.cursor_gap
    union all
    select concat_ws(' ', 'not claimed', m.id, 'group', c.group_id)
    from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id and s.name = 'orders'
    join {schema}.cursor c on c.group_id = g.id join {schema}.message_log_1 m on m.id > c.claimed
    union all
    select concat_ws(' ', e.state, e.message_id, 'key', quote_literal(e.message_key), e.lane, 'group', e.group_id, e.concurrency,
        'failures', e.failures, 'rank', e.compaction_rank, 'due in', e.due_at - clock_timestamp(), 'host', e.host_id, 'lease:',
        l.message_key is not null, 'host', l.host_id, 'blocked by', l.blocked_by, 'rests', l.rests)
    from {schema}.exception e
    left join {schema}.message_key_lease l on l.group_id = e.group_id and l.message_key = e.message_key and l.lane = e.lane
    where not (e.state = 'deferred' and (coalesce(l.rests, false) and e.dead_letter_id is not null or exists (
        select from {schema}.dead_letter d
        where d.group_id = e.group_id and d.message_id = l.blocked_by and d.redriven_at is null)) is true)
    union all
    select concat_ws(' ', 'key', quote_literal(message_key), lane, 'group', group_id, 'host', host_id, 'blocked by', blocked_by, rests)
    from {schema}.message_key_lease l
    where not rests and not exists (
        select from {schema}.dead_letter d where d.group_id = l.group_id and d.message_id = l.blocked_by and d.redriven_at is null)
    union all                                   -- a dead host's row goes with its lease
    select concat_ws(' ', 'hosts', string_agg(name, ', ')) from {schema}.host
    having count(*) <> 3 or count(distinct split_part(name, '.', 1)) <> 3
) as unfinished limit 20
