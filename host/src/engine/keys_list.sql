-- Keys of group $1 that somebody has or that wait for something, with what is deferred behind them; $2 rows of either are
-- read at most. Called by engine::keys after bounded_read.sql; message_key_lease primary key, exception_deferred.
with key as materialized (
    select message_key, lane, host_id, blocked_by, paused_at, rests, changed_at from {schema}.message_key_lease
    where group_id between $1 and $1 order by group_id, message_key, lane limit $2
),
behind as materialized (
    select message_key, lane, count(*) as depth, min(message_id) as first_id
    from (
        select message_key, lane, message_id from {schema}.exception
        where group_id between $1 and $1 and state = 'deferred' order by group_id, message_key, lane, message_id limit $2
    ) as e
    group by message_key, lane
)
select k.message_key, k.lane,
    case
        when k.paused_at is not null then 'paused' when k.rests then 'resting' when k.host_id is not null then 'leased'
        when e.message_id is not null then 'waiting' when k.blocked_by is not null then 'blocked' else 'ready'
    end as state,
    h.name as host, k.blocked_by, e.failures, d.id as dead_letter, coalesce(e.last_class, d.class) as class,
    to_char(e.due_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as due_at,
    coalesce(b.depth, 0) + (e.message_id is not null)::integer as depth, least(k.blocked_by, b.first_id) as oldest_id,
    (extract(epoch from clock_timestamp() - k.changed_at) * 1000)::bigint as since_ms
from key k
left join behind b using (message_key, lane)
left join {schema}.host h on h.id = k.host_id
left join {schema}.exception e on e.group_id = $1 and e.message_id = k.blocked_by
left join {schema}.dead_letter d on d.group_id = $1 and d.message_id = k.blocked_by and e.message_id is null
