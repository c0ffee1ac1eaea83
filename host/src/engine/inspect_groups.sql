-- How the groups of one stream stand. $1: figures are counted up to so many rows and estimated above (10,000).
-- Called by engine::inspect, with one statement for each stream.
--
-- Reads a bounded number of rows for each group, whatever the sizes: every count goes through an index range in its
-- order and ends at $1 + 1. `between g.id and g.id` is an equality that the planner does not see through, so that only
-- the index that begins with group_id gives the order; else it may walk another group's rows. Indexes: message_log primary key, dead_letter_open, exception_due, exception_host,
-- exception_deferred, exception primary key, claim_group, cursor_gap_group, message_key_lease_blocked, dead_letter_once.
select g.name, g.handler, g.paused_at is not null as paused,
    fresh.count as fresh, late.count as late, ahead.ids as ids_ahead,
    claimed.pending + running.count as in_flight, due.waiting as retrying, due.delayed, deferred.count as deferred,
    dead.count as dead, dead.first_id as dead_first, dead.last_id as dead_counted_to, newest_dead.id as dead_last,
    leases.blocked as blocked_keys, gap.count as gaps, oldest_gap.pid as oldest_gap_pid,
    (extract(epoch from clock_timestamp() - oldest.created_at) * 1000)::bigint as oldest_age_ms,
    serving.digest
from {schema}.consumer_group g
join {schema}.cursor c on c.group_id = g.id
cross join lateral (
    select count(*) as count, min(id) as first_id from (
        select id from {schema}.message_log_{stream_id} where id > c.claimed order by id limit $1 + 1
    ) as l
) as fresh
cross join lateral (
    select greatest(coalesce((select id from {schema}.message_log_{stream_id} order by id desc limit 1), 0) - c.claimed, 0) as ids
) as ahead
cross join lateral (
    select count(*) as count, min(id) as first_id from (
        select l.id
        from (select missing from {schema}.cursor_gap where group_id = g.id order by id limit 1000) as open_gap,
            unnest(open_gap.missing) as r (ids), lateral (
                select id from {schema}.message_log_{stream_id}
                where id >= lower(r.ids) and id < upper(r.ids) order by id limit $1 + 1
            ) as l
        limit $1 + 1
    ) as l
) as late
cross join lateral (
    select coalesce(sum(upper(r.ids) - lower(r.ids)), 0)::bigint as pending, min(lower(r.ids)) as first_id
    from {schema}.claim k, unnest(k.pending) as r (ids) where k.group_id = g.id and k.id > 0
) as claimed
cross join lateral (
    select count(*) as count from {schema}.host h, lateral (
        select from {schema}.exception where host_id = h.id and group_id = g.id and state = 'running' limit $1 + 1
    ) as e
) as running
cross join lateral (
    select count(*) filter (where state = 'waiting') as waiting, count(*) filter (where state = 'delayed') as delayed from (
        select state from {schema}.exception
        where group_id between g.id and g.id and state in ('waiting', 'delayed') order by group_id, due_at limit $1 + 1
    ) as e
) as due
cross join lateral (
    select count(*) as count from (
        select from {schema}.exception
        where group_id between g.id and g.id and state = 'deferred'
        order by group_id, message_key, lane, message_id limit $1 + 1
    ) as e
) as deferred
cross join lateral (
    select count(*) as count, min(id) as first_id, max(id) as last_id from (
        select id from {schema}.dead_letter
        where group_id between g.id and g.id and redriven_at is null order by group_id, id limit $1 + 1
    ) as d
) as dead
left join lateral (
    select id from {schema}.dead_letter
    where group_id between g.id and g.id and redriven_at is null order by group_id desc, id desc limit 1
) as newest_dead on true
cross join lateral (
    select count(*) as blocked, min(d.message_id) as first_dead_head from (
        select blocked_by from {schema}.message_key_lease
        where group_id between g.id and g.id and blocked_by is not null order by group_id limit $1 + 1
    ) as k
    left join {schema}.dead_letter d on d.group_id = g.id and d.message_id = k.blocked_by
) as leases
cross join lateral (
    select count(*) as count from (select from {schema}.cursor_gap where group_id = g.id limit 1000) as o
) as gap
left join lateral (
    -- The producer that still holds the oldest gap open, if one does.
    select h.pid
    from (select holders, pids from {schema}.cursor_gap where group_id = g.id order by id limit 1) as o,
        unnest(o.holders, o.pids) as h (transaction, pid)
    where exists (select from pg_catalog.pg_locks where virtualtransaction = h.transaction and locktype = 'advisory'
        and classid = {lock_class} and objid = {stream_id} and objsubid = 2)
    limit 1
) as oldest_gap on true
left join lateral (
    -- Of the messages not yet ended, and of dead letters that their keys wait for. A delayed one is not late before it is due.
    select coalesce(l.created_at, d.produced_at) as created_at
    from (
        select least(fresh.first_id, late.first_id, claimed.first_id, e.first_id, leases.first_dead_head) as id
        from (
            select min(message_id) as first_id from (
                select message_id, state, due_at from {schema}.exception
                where group_id between g.id and g.id order by group_id, message_id limit $1 + 1
            ) as e where state <> 'delayed' or due_at <= clock_timestamp()
        ) as e
    ) as first_id
    left join {schema}.message_log_{stream_id} l on l.id = first_id.id
    left join {schema}.dead_letter d on d.group_id = g.id and d.message_id = first_id.id and l.id is null
) as oldest on true
left join lateral (
    -- As the hosts that live now have told it; the newest where they differ.
    select h.stats #>> array['handlers', g.name, 'digest'] as digest
    from {schema}.host h
    where h.expires_at > clock_timestamp() and h.stats #>> array['handlers', g.name, 'digest'] is not null
    order by (h.stats #>> array['handlers', g.name, 'loaded_at_ms'])::bigint desc nulls last limit 1
) as serving on true
where g.stream_id = {stream_id}
order by g.name
