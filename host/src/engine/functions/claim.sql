-- The claim algorithm: one turn of one group on one host, in one short transaction of its own.
-- Installed by `engine::functions` for every stream; called by `engine::claim`.
--
--   1. The host's lease must be alive, else nothing happens.
--   2. Claims that ended `done` to the last message, without effects, are settled.
--   3. The group's claims are serialised by an advisory lock that is only tried. Who does not get it has settled and is done.
--   4. The log after the cursor, and what has since appeared in the open gaps, are read in ONE statement, so that of two
--      messages of one key the later is never seen without the earlier.
--   5. Retries and delayed messages that are due are taken with SKIP LOCKED.
--
-- The gap rule. Ids commit out of order. Only an id missing below a visible one can hide a late message. The contiguous
-- prefix is taken first; a hole at the frontier is stepped over once the row above it is 20 ms old, and goes to
-- cursor_gap with the transactions that hold the producer lock, read from pg_locks after the snapshot that showed the
-- hole. A gap none of whose holders is left when a turn begins is read a last time by that turn, and closed. PREPARE
-- TRANSACTION gives its locks a new virtual transaction (-1/xid), so no gap is closed while a prepared producer is left.
--
-- With a filter, up to 1000 rows are looked at in a turn, so that a group that wants few messages passes the others fast.
--
-- Indexes: exception_due. The log is only read through functions/log.sql, which touches few partitions.
--
-- Rows: the first has source 0 and tells how the turn went (note, settled, frontier); the others are messages,
-- source 1 from the log under claim_id, source 2 from exception.
create or replace function {schema}.claim_{stream_id}(
    p_group integer,
    p_host bigint,
    p_epoch bigint,
    p_finished bigint[],                        -- claims to settle
    p_want integer,                             -- fresh messages at most
    p_want_bytes bigint,                        -- payload bytes at most, but always one message
    p_want_retries integer,                     -- due exceptions at most: free slots
    p_routing_keys text[],                      -- the group's filter as LIKE patterns; null: not given
    p_keys text[],
    p_not_keys text[],
    p_headers jsonb
) returns table (
    source smallint,
    note text,
    settled bigint[],
    frontier bigint,
    claim_id bigint,
    message_id bigint,
    message_key text,
    compaction_rank bigint,
    routing_key text,
    headers text,
    content_type text,
    payload bytea,
    produced_at_ms bigint,
    failures integer,
    redriven boolean,
    replay boolean
)
-- Without JIT: estimates over arrays are wild, and compiling takes seconds. One plan for all turns: planning anew looks at
-- every partition, and takes three times as long as the turn (4.5 ms against 1.5 with 28 partitions).
language plpgsql set search_path = pg_catalog, pg_temp set jit = off set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_note text;
    v_settled bigint[];
    v_cursor bigint;
    v_frontier bigint;
    v_claim bigint;
    v_live text[];                              -- producers alive before this turn's snapshot; null: no gap is open
    v_prepared boolean;                         -- one of them is a prepared transaction
    v_scan integer := p_want;                   -- rows to look at
    v_due bigint[];                             -- exceptions this turn takes
begin
    -- Losing a plain claim or settle in a crash of the database only means a redelivery.
    perform set_config('synchronous_commit', 'off', true);

    perform from {schema}.host where id = p_host and expires_at > clock_timestamp() for key share;
    if not found then
        return query select 0::smallint, 'lease_lost', '{}'::bigint[], null::bigint, null::bigint, null::bigint, null, null::bigint,
            null, null, null, null::bytea, null::bigint, null::integer, null::boolean, null::boolean;
        return;
    end if;

    if p_finished <> '{}' then
        with gone as (
            delete from {schema}.claim where id = any (p_finished) and host_id = p_host and group_id = p_group returning id
        )
        select array_agg(id) into v_settled from gone;
    end if;

    select case when epoch <> p_epoch then 'epoch' when paused_at is not null then 'paused' else 'claimed' end
    into v_note from {schema}.consumer_group where id = p_group;
    if v_note = 'claimed' and p_want <= 0 and p_want_retries <= 0 then
        v_note := 'settled';
    elsif v_note = 'claimed' and not pg_try_advisory_xact_lock({lock_class} + 1, p_group) then
        v_note := 'busy';
    end if;
    if v_note is distinct from 'claimed' then
        return query select 0::smallint, coalesce(v_note, 'gone'), coalesce(v_settled, '{}'), null::bigint, null::bigint, null::bigint,
            null, null::bigint, null, null, null, null::bytea, null::bigint, null::integer, null::boolean, null::boolean;
        return;
    end if;

    select claimed into v_cursor from {schema}.cursor where group_id = p_group;
    v_claim := nextval('{schema_text}.claim_id');

    if exists (select from {schema}.cursor_gap where group_id = p_group) then
        select coalesce(array_agg(virtualtransaction), '{}'), coalesce(bool_or(virtualtransaction like '-1/%'), false)
        into v_live, v_prepared
        from pg_locks
        where locktype = 'advisory' and classid = {lock_class} and objid = {stream_id} and objsubid = 2 and granted
            and database = (select oid from pg_database where datname = current_database());
    end if;

    if p_want > 0 and (p_routing_keys is not null or p_keys is not null or p_not_keys is not null or p_headers is not null) then
        v_scan := greatest(p_want, 1000);
    end if;

    if p_want > 0 then
        return query
        with head as materialized (             -- what stands after the cursor, without payloads
            select * from (
                select l.*, row_number() over (order by l.id) as n, count(*) filter (where l.matches) over (order by l.id) as wanted,
                    coalesce(sum(l.payload_bytes) filter (where l.matches) over (order by l.id), 0) as bytes
                from (
                    select m.*, (p_routing_keys is null or m.routing_key like any (p_routing_keys))
                        and (p_keys is null or m.message_key like any (p_keys))
                        and (p_not_keys is null or m.message_key is null or not m.message_key like any (p_not_keys))
                        and (p_headers is null or m.headers @> p_headers) as matches
                    from {schema}.log_heads_{stream_id}(v_cursor, v_scan) m
                ) as l
            ) as l where l.wanted <= p_want
        ),
        open_gap as materialized (
            select id, missing, (v_prepared or v_live && holders) and not isempty(missing) as undecided
            from {schema}.cursor_gap where v_live is not null and group_id = p_group
            order by id limit 1000
        ),
        late as materialized (                  -- what has appeared in gaps
            select l.*, (p_routing_keys is null or l.routing_key like any (p_routing_keys))
                    and (p_keys is null or l.message_key like any (p_keys))
                    and (p_not_keys is null or l.message_key is null or not l.message_key like any (p_not_keys))
                    and (p_headers is null or l.headers @> p_headers) as matches,
                row_number() over (order by l.id) as n, sum(coalesce(octet_length(l.payload), 0)) over (order by l.id) as bytes
            from (
                select (g.message).*, g.gap_id from {schema}.log_in_gaps_{stream_id}(p_group, p_want) g where v_live is not null
            ) as l
        ),
        late_taken as materialized (
            select id, gap_id from late where n = 1 or (n <= p_want and bytes <= p_want_bytes)
        ),
        whole as (                              -- did every late message fit?
            select (select count(*) from late) = (select count(*) from late_taken) as late
        ),
        reach as materialized (                 -- how far the cursor goes
            select case
                    when not whole.late then v_cursor      -- the rest of the gaps comes before anything newer
                    when prefix is not null then prefix
                    when settled_hole then top
                    else v_cursor
                end as id
            from whole, (
                select max(id) filter (where id = v_cursor + n) as prefix, max(id) as top,
                    -- A clock that was set back must not make the hole wait until it has caught up.
                    bool_or(n = 1 and created_at not between clock_timestamp() - interval '20 ms' and clock_timestamp())
                        as settled_hole
                from head where wanted <= 1 or bytes <= p_want_bytes
            ) as h
        ),
        hole as (
            select range_agg(int8range(below + 1, id)) as missing
            from (select h.id, lag(h.id, 1, v_cursor) over (order by h.id) as below from head h, reach where h.id <= reach.id) as pairs
            where id > below + 1
        ),
        new_gap as (
            insert into {schema}.cursor_gap (group_id, missing, holders, pids)
            select p_group, hole.missing, held.holders, held.pids
            from hole, lateral (
                select coalesce(array_agg(virtualtransaction), '{}') as holders, coalesce(array_agg(pid), '{}') as pids
                from pg_locks
                where hole.missing is not null
                    and locktype = 'advisory' and classid = {lock_class} and objid = {stream_id} and objsubid = 2 and granted
                    and database = (select oid from pg_database where datname = current_database())
            ) as held
            where hole.missing is not null
        ),
        moved as (
            update {schema}.cursor set claimed = reach.id from reach where group_id = p_group and reach.id > v_cursor
        ),
        closed as (
            delete from {schema}.cursor_gap g using open_gap o, whole where g.id = o.id and not o.undecided and whole.late
        ),
        shrunk as (
            update {schema}.cursor_gap g set missing = g.missing - t.ids
            from (select gap_id, range_agg(int8range(id, id, '[]')) as ids from late_taken group by gap_id) as t, open_gap o, whole
            where g.id = t.gap_id and o.id = g.id and (o.undecided or not whole.late)
        ),
        taken as materialized (                 -- everything this turn is answerable for, the filter applied
            select id, coalesce(deliver_after <= clock_timestamp(), true) as due, deliver_after, message_key
            from (
                select h.id, h.deliver_after, h.message_key from head h, reach where h.matches and h.id <= reach.id
                union all
                select l.id, l.deliver_after, l.message_key from late l join late_taken using (id) where l.matches
            ) as m
        ),
        delayed as (
            insert into {schema}.exception (group_id, message_id, state, due_at, message_key)
            select p_group, id, 'delayed', deliver_after, message_key from taken where not due
        ),
        claimed as (
            insert into {schema}.claim (id, group_id, host_id, pending)
            select v_claim, p_group, p_host, ids.pending
            from (
                select case
                    when max(id) - min(id) + 1 = count(*) then int8multirange(int8range(min(id), max(id), '[]'))
                    else range_agg(int8range(id, id, '[]')) end as pending
                from taken where due
            ) as ids
            where ids.pending is not null
        )
        select 1::smallint, null::text, null::bigint[], null::bigint, v_claim, m.id, m.message_key, m.compaction_rank,
            m.routing_key, m.headers::text, m.content_type, m.payload, (extract(epoch from m.created_at) * 1000)::bigint,
            0, false, false
        from (
            select h.id, h.message_key, h.compaction_rank, h.routing_key, h.headers, h.content_type, h.payload, h.created_at
            from reach, {schema}.log_between_{stream_id}(v_cursor, reach.id) h
            union all
            select l.id, l.message_key, l.compaction_rank, l.routing_key, l.headers, l.content_type, l.payload, l.created_at from late l
        ) as m join taken t on t.id = m.id and t.due;
        select claimed into v_frontier from {schema}.cursor where group_id = p_group;
    end if;

    if p_want_retries > 0 then
        select array_agg(message_id) into v_due from (
            select message_id from {schema}.exception
            where group_id = p_group and state in ('waiting', 'delayed') and due_at <= clock_timestamp()
            order by due_at limit p_want_retries for update skip locked
        ) as due;
    end if;
    if v_due is not null then
        return query
        with due as materialized (              -- each with its message, from the log or from its dead letter's copy
            select e.message_id, e.message_key, e.failures, e.dead_letter_id, e.replay, e.concurrency, e.last_digest,
                l.id is not null or d.id is not null as is_there, coalesce(l.compaction_rank, d.compaction_rank) as compaction_rank,
                coalesce(l.routing_key, d.routing_key) as routing_key, coalesce(l.headers, d.headers) as headers,
                coalesce(l.content_type, d.content_type) as content_type, coalesce(l.payload, d.payload) as payload,
                coalesce(l.created_at, d.produced_at) as produced_at
            from {schema}.exception e
            left join {schema}.log_rows_{stream_id}(v_due) l on l.id = e.message_id
            left join {schema}.dead_letter d on d.id = e.dead_letter_id
            where e.group_id = p_group and e.message_id = any (v_due)
        ),
        taken as (
            update {schema}.exception e
            set state = 'running', due_at = null, host_id = p_host, claim_id = v_claim
            from due where e.group_id = p_group and e.message_id = due.message_id and due.is_there
        ),
        vanished as (                           -- somebody removed the message by hand: it ends, and says so
            delete from {schema}.exception e using due
            where e.group_id = p_group and e.message_id = due.message_id and not due.is_there
        ),
        dead as (
            insert into {schema}.dead_letter (group_id, stream_id, message_id, attempts, class, error, digest, message_key,
                concurrency, produced_at)
            select p_group, {stream_id}, message_id, failures, 'host', 'the message is no longer in the log, so it cannot be delivered again',
                last_digest, message_key, concurrency, clock_timestamp()
            from due where not is_there
            on conflict on constraint dead_letter_once do nothing
        )
        select 2::smallint, null::text, null::bigint[], null::bigint, v_claim, t.message_id, t.message_key, t.compaction_rank,
            t.routing_key, t.headers::text, t.content_type, t.payload, (extract(epoch from t.produced_at) * 1000)::bigint, t.failures,
            t.dead_letter_id is not null, t.replay
        from due t where t.is_there
        order by t.message_id;
    end if;

    return query select 0::smallint, v_note, coalesce(v_settled, '{}'), v_frontier, null::bigint, v_cursor, null, null::bigint,
        null, null, null, null::bytea, null::bigint, null::integer, null::boolean, null::boolean;
end
$$;

-- Has anything appeared in the group's gaps, or is one of them decided? The producers are read before the gaps, so what
-- is missed here is found by the next look. Called by groups_with_work.
create or replace function {schema}.has_late_{stream_id}(p_group integer) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan
as $$
declare
    v_live text[];
    v_prepared boolean;
begin
    select coalesce(array_agg(virtualtransaction), '{}'), coalesce(bool_or(virtualtransaction like '-1/%'), false)
    into v_live, v_prepared
    from pg_locks
    where locktype = 'advisory' and classid = {lock_class} and objid = {stream_id} and objsubid = 2 and granted
        and database = (select oid from pg_database where datname = current_database());
    return exists (
            select from {schema}.cursor_gap
            where group_id = p_group and not ((v_prepared or v_live && holders) and not isempty(missing)))
        or exists (select from {schema}.log_in_gaps_{stream_id}(p_group, 0));
end
$$;
