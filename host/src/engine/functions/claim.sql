-- The claim algorithm: one turn of one group on one host, in one short transaction of its own.
-- Installed by `engine::functions` for every stream; called by `engine::claim`.
--
--   1. The host's lease must be alive, else nothing happens.
--   2. What ended `done` without effects is settled: whole claims, single messages of claims, single exceptions.
--   3. The group's claims are serialised by an advisory lock that is only tried. Who does not get it has settled and is done.
--   4. Keys: what is deferred behind keys that are ready, or idle on this host, is taken (functions/keys.sql).
--   5. Retries and delayed messages that are due are taken with SKIP LOCKED.
--   6. The log after the cursor, and what has since appeared in the open gaps, are read in ONE statement, so that of two
--      messages of one key the later is never seen without the earlier. Keyed ones among them lease their key, or are
--      deferred behind it; versions that are not their key's winner end here.
--   7. Keys that got nothing are let go.
--
-- The gap rule. Ids commit out of order. Only an id missing below a visible one can hide a late message. The contiguous
-- prefix is taken at once; a hole is stepped over once the row above it is 15 ms old (with a look each 5 ms,
-- an open producer delays others by 20 ms at most: T4), and goes to cursor_gap with the transactions that hold the producer
-- lock, read from pg_locks after the snapshot that showed the hole. A gap none of whose holders is left when a turn begins is read a last time by that turn, and closed. PREPARE
-- TRANSACTION gives its locks a new virtual transaction (-1/xid), so no gap is closed while a prepared producer is left.
--
-- With a filter, up to 1000 rows are looked at in a turn, so that a group that wants few messages passes the others fast.
--
-- Most turns find no gap, no filter, no delayed message and no hole: they only look how far the log goes, and what keys
-- matter on the way, and read that far. The long statement would find the same.
-- Indexes: primary keys of host, claim, cursor and exception, cursor_gap_group, exception_due, message_key_lease_ready. How it
-- reads the log stands in functions/log.sql: few partitions of it.
--
-- Messages of one turn share a claim, so that most are settled with one row. Where each is settled in a transaction of its
-- own, as with SQL of handlers, they would wait for each other at that row, each through the other's commit: there each
-- has its own (p_apart; 16 slots: 750 deliveries a second with one claim, see docs/performance.md).
--
-- Rows: the first has source 0 and tells how the turn went (note, settled, ran, frontier); the others are messages,
-- source 1 from the log under claim_id, source 2 from exception.
create or replace function {schema}.claim_{stream_id}(
    p_group integer,
    p_host bigint,
    p_epoch bigint,
    p_finished bigint[],                        -- claims to settle whole
    p_done_claims bigint[],                     -- pairs of claim and message to settle
    p_done_ids bigint[],
    p_ran_claims bigint[],                      -- the same of running exceptions
    p_ran_ids bigint[],
    p_is_durable boolean,                       -- keyed messages are among what is settled
    p_idle_keys text[],                         -- keys of this host with nothing left to run here
    p_idle_lanes smallint[],
    p_full_keys text[],                         -- keys of this host with enough to run here
    p_full_lanes smallint[],
    p_lane_max integer,                         -- messages of one key at most
    p_want integer,                             -- fresh messages at most
    p_want_bytes bigint,                        -- payload bytes at most, but always one message
    p_want_retries integer,                     -- due exceptions at most: free slots
    p_override {schema}.concurrency,            -- the group's concurrency_override; null: none
    p_marks_gaps boolean,                       -- later messages of a key tell of an earlier dead letter
    p_routing_keys text[],                      -- the group's filter as LIKE patterns; null: not given
    p_keys text[],
    p_not_keys text[],
    p_headers jsonb,
    p_apart boolean default false               -- a claim for each message: see above
) returns table (
    source smallint,
    note text,
    settled bigint[],                           -- claims of p_finished and p_done_claims that still were ours
    ran bigint[],                               -- messages of p_ran_ids that still were ours
    frontier bigint,
    claim_id bigint,
    message_id bigint,                          -- of the first row: where the cursor stood
    message_key text,
    compaction_rank bigint,
    routing_key text,
    headers text,
    content_type text,
    payload bytea,
    produced_at_ms bigint,
    failures integer,
    redriven boolean,
    replay boolean,
    concurrency text,                           -- as the group treats it
    lane smallint,
    skipped bigint,
    gap_since bigint
)
-- Without JIT: estimates over arrays are wild, and compiling takes seconds. One plan for all turns: planning anew looks at
-- every partition, and takes three times as long as the turn (4.5 ms against 1.5 with 28 partitions). That plan is made
-- while tables may be empty and kept when they are not, so it may not scan one.
language plpgsql set search_path = pg_catalog, pg_temp set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    v_note text;
    v_settled bigint[] := '{}';
    v_ran bigint[] := '{}';
    v_durable text := current_setting('synchronous_commit');
    v_claims boolean;                           -- more than settling is wanted
    v_cursor bigint;
    v_replay_upto bigint;                       -- up to here the group had claimed before it was sent back
    v_frontier bigint;
    v_claim bigint;
    v_live text[];                              -- producers alive before this turn's snapshot; null: no gap is open
    v_prepared boolean;                         -- one of them is a prepared transaction
    v_want integer;                             -- fresh messages at most, of the log
    v_scan integer;                             -- rows to look at
    v_is_filtered boolean;
    v_held_keys text[] := p_idle_keys;          -- keys that are to be let go if they get nothing
    v_held_lanes smallint[] := p_idle_lanes;
    v_exceptions bigint[] := '{}';              -- exceptions this turn takes
    v_cursor_at tid;                            -- nobody else moves it: only under the group's lock
    v_gap bigint;                               -- the first open gap
    v_gap_floor bigint;
    v_has_gaps boolean;
    v_partition text;                           -- of the log, where the cursor stands; null: the long way
    v_upto bigint;                              -- the end of what follows the cursor without a hole
    v_is_whole boolean;                         -- every id up to there is taken
    v_is_plain boolean;                         -- and no key matters
    v_is_all boolean;                           -- and all of them are taken now
    v_run bigint[];                             -- messages of the log this turn takes
    v_apart bigint[];                           -- and the claim of each, where it is not v_claim
    v_late bigint[];                            -- those of them that lie in gaps
    v_keyed_ids bigint[];                       -- fresh messages with a key mode, or compacted
    v_keyed_keys text[];
    v_keyed_lanes smallint[];
    v_keyed_modes {schema}.concurrency[];
    v_keyed_compacted boolean[];
    v_keyed_due timestamptz[];                  -- null: now
    v_keyed_run bigint[];                       -- those of them this turn takes
    v_skip_keys text[];                         -- versions passed over before a compacted message
    v_skip_versions bigint[];
begin
    -- Losing a plain claim or settle in a crash of the database only means a redelivery; with keys it could mean two.
    if not p_is_durable then
        perform set_config('synchronous_commit', 'off', true);
    end if;

    perform from {schema}.host where id = p_host and expires_at > clock_timestamp() for key share;
    if not found then
        return query select * from {schema}.turn_note('lease_lost', '{}', '{}', null, null);
        return;
    end if;

    if p_finished <> '{}' then
        with gone as (
            delete from {schema}.claim where id = any (p_finished) and host_id = p_host and group_id = p_group returning id
        )
        select coalesce(array_agg(id), '{}') into v_settled from gone;
    end if;
    if p_done_claims <> '{}' then
        select v_settled || coalesce(array_agg(c), '{}') into v_settled
        from {schema}.settle_claims(p_group, p_host, p_done_claims, p_done_ids) as c;
    end if;
    if p_ran_claims <> '{}' then
        with gone as (
            delete from {schema}.exception
            where host_id = p_host and ctid = any (array(
                select e.at from unnest(p_ran_claims, p_ran_ids) as r (claim_id, message_id)
                cross join lateral (
                    select ctid, claim_id from {schema}.exception where group_id = p_group and message_id = r.message_id offset 0
                ) as e (at, claim_id)
                where e.claim_id = r.claim_id))
            returning message_id
        )
        select coalesce(array_agg(message_id), '{}') into v_ran from gone;
    end if;

    select case when epoch <> p_epoch then 'epoch' when paused_at is not null then 'paused' else 'claimed' end
    into v_note from {schema}.consumer_group where id = p_group;
    v_note := coalesce(v_note, 'gone');
    v_claims := v_note = 'claimed' and (p_want > 0 or p_want_retries > 0);
    if v_note = 'claimed' and not v_claims then
        v_note := 'settled';
    end if;
    if v_note in ('gone', 'epoch') or not v_claims and p_idle_keys = '{}' then
        return query select * from {schema}.turn_note(v_note, v_settled, v_ran, null, null);
        return;
    end if;
    if not pg_try_advisory_xact_lock({lock_class} + 1, p_group) then
        return query select * from {schema}.turn_note('busy', v_settled, v_ran, null, null);
        return;
    end if;
    if not v_claims then
        perform {schema}.release_keys(p_group, p_host, p_idle_keys, p_idle_lanes);
        return query select * from {schema}.turn_note(v_note, v_settled, v_ran, null, null);
        return;
    end if;

    v_claim := nextval('{schema_text}.claim_id');
    if exists (select from {schema}.message_key_lease
            where group_id = p_group and host_id is null and blocked_by is null and paused_at is null and (not rests or buries))
    then
        perform {schema}.bury_resting_{stream_id}(p_group);
        if p_want > 0 then
            with mine as (
                update {schema}.message_key_lease l set host_id = p_host, changed_at = clock_timestamp()
                from (
                    select message_key, lane from {schema}.message_key_lease
                    where group_id = p_group and host_id is null and blocked_by is null and paused_at is null
                        and (not rests or buries) and not rests
                    limit p_want
                ) as r
                where l.group_id = p_group and l.message_key = r.message_key and l.lane = r.lane
                returning l.message_key, l.lane
            )
            select v_held_keys || array_agg(message_key), v_held_lanes || array_agg(lane) into v_held_keys, v_held_lanes from mine;
        end if;
    end if;
    if v_held_keys <> '{}' and p_want > 0 then
        v_exceptions := {schema}.take_deferred_{stream_id}(p_group, p_host, v_claim, v_held_keys, v_held_lanes, p_lane_max, p_want,
            p_want_bytes);
    end if;
    v_want := p_want - cardinality(v_exceptions);
    if p_want_retries > 0 then
        v_exceptions := v_exceptions || {schema}.take_due_{stream_id}(p_group, p_host, v_claim, p_want_retries);
    end if;

    select ctid, claimed, replay_upto, gap_floor into v_cursor_at, v_cursor, v_replay_upto, v_gap_floor
    from {schema}.cursor where group_id = p_group order by claimed desc limit 1;
    v_frontier := v_cursor;
    select id into v_gap from {schema}.cursor_gap where group_id = p_group and id >= v_gap_floor order by id limit 1;
    v_has_gaps := v_want > 0 and v_gap is not null;
    -- A gap that opens later has a higher id than any.
    v_gap_floor := coalesce(v_gap, pg_sequence_last_value('{schema_text}.cursor_gap_id_seq') + 1, v_gap_floor);
    v_is_filtered := coalesce(p_routing_keys, p_keys, p_not_keys) is not null or p_headers is not null;
    if v_want > 0 and not v_has_gaps and not v_is_filtered then
        v_partition := {schema}.log_partition_{stream_id}(v_cursor + 1);
    end if;
    if v_partition is not null then
        select upto, is_plain, is_due and (bytes <= p_want_bytes or upto = v_cursor + 1) into v_upto, v_is_plain, v_is_whole
        from {schema}.log_prefix_{stream_id}(v_partition, v_cursor, v_want, p_override);
    end if;
    if v_is_whole then
        v_frontier := v_upto;
        update {schema}.cursor set claimed = v_frontier, gap_floor = v_gap_floor where ctid = v_cursor_at;
        if not v_is_plain then
            select plain, ids, keys, lanes, modes, compacted, array_fill(null::timestamptz, array[cardinality(ids)])
            into v_run, v_keyed_ids, v_keyed_keys, v_keyed_lanes, v_keyed_modes, v_keyed_compacted, v_keyed_due
            from {schema}.log_keys_{stream_id}(v_partition, v_cursor, v_frontier, p_override);
        end if;
    elsif v_want > 0 then
        if v_has_gaps then
            select coalesce(array_agg(virtualtransaction), '{}'), coalesce(bool_or(virtualtransaction like '-1/%'), false)
            into v_live, v_prepared
            from pg_locks
            where locktype = 'advisory' and classid = {lock_class} and objid = {stream_id} and objsubid = 2 and granted
                and database = (select oid from pg_database where datname = current_database());
        end if;
        v_scan := case when v_is_filtered then greatest(v_want, 1000) else v_want end;

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
            ) as l where l.wanted <= v_want
        ),
        open_gap as materialized (
            select id, missing, (v_prepared or v_live && holders) and not isempty(missing) as undecided
            from {schema}.cursor_gap where v_live is not null and group_id = p_group and id >= v_gap_floor
            order by id limit 1000
        ),
        late as materialized (                  -- what has appeared in gaps
            select l.*, (p_routing_keys is null or l.routing_key like any (p_routing_keys))
                    and (p_keys is null or l.message_key like any (p_keys))
                    and (p_not_keys is null or l.message_key is null or not l.message_key like any (p_not_keys))
                    and (p_headers is null or l.headers @> p_headers) as matches,
                row_number() over (order by l.id) as n, sum(coalesce(octet_length(l.payload), 0)) over (order by l.id) as bytes
            from (
                select (g.message).*, g.gap_id from {schema}.log_in_gaps_{stream_id}(p_group, v_gap_floor, v_want) g where v_live is not null
            ) as l
        ),
        late_taken as materialized (
            select id, gap_id from late where n = 1 or (n <= v_want and bytes <= p_want_bytes)
        ),
        whole as (                              -- did every late message fit?
            select (select count(*) from late) = (select count(*) from late_taken) as late
        ),
        reach as materialized (                 -- how far the cursor goes
            select case
                    when not whole.late then v_cursor      -- the rest of the gaps comes before anything newer
                    else coalesce(near, v_cursor)
                end as id
            from whole, (
                select max(id) filter (where young_holes = 0) as near
                from (
                    -- A clock that was set back must not make the hole wait until it has caught up.
                    select id, count(*) filter (where id > below + 1
                        and created_at between clock_timestamp() - interval '15 ms' and clock_timestamp()) over (order by id)
                        as young_holes
                    from (select *, lag(id, 1, v_cursor) over (order by id) as below from head) as h
                    where wanted <= 1 or bytes <= p_want_bytes
                ) as h
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
            update {schema}.cursor set claimed = reach.id, gap_floor = v_gap_floor from reach
            where ctid = v_cursor_at and reach.id > v_cursor
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
            select id, is_late, message_key, lane, mode, compacted, mode = 'parallel' and not compacted as is_plain, deliver_after,
                coalesce(deliver_after <= clock_timestamp(), true) as is_due
            from (
                select h.id, false as is_late, h.deliver_after, h.message_key, h.lane, h.compaction_rank is not null as compacted,
                    least(h.concurrency, p_override) as mode
                from head h, reach where h.matches and h.id <= reach.id
                union all
                select l.id, true, l.deliver_after, l.message_key, l.lane, l.compaction_rank is not null,
                    least(l.concurrency, p_override)
                from late l join late_taken using (id) where l.matches
            ) as m
        ),
        delayed as (
            insert into {schema}.exception (group_id, message_id, state, due_at, message_key)
            select p_group, id, 'delayed', deliver_after, message_key from taken where is_plain and not is_due
            on conflict (group_id, message_id) do nothing -- it was redriven as well
        )
        select (select id from reach),
            array_agg(id) filter (where is_plain and is_due), array_agg(id) filter (where is_late),
            array_agg(id) filter (where not is_plain), array_agg(message_key) filter (where not is_plain),
            array_agg(lane) filter (where not is_plain), array_agg(mode) filter (where not is_plain),
            array_agg(compacted) filter (where not is_plain),
            array_agg(case when not is_due then deliver_after end) filter (where not is_plain)
        into v_frontier, v_run, v_late, v_keyed_ids, v_keyed_keys, v_keyed_lanes, v_keyed_modes, v_keyed_compacted, v_keyed_due
        from taken;
    end if;
    if v_keyed_ids is not null then
        v_keyed_run := {schema}.lease_fresh_{stream_id}(p_group, p_host, v_keyed_ids, v_keyed_keys, v_keyed_lanes, v_keyed_modes,
            v_keyed_compacted, v_keyed_due, p_full_keys, p_full_lanes, p_lane_max);
        v_run := v_run || v_keyed_run;
    end if;
    if p_apart and v_is_whole and v_is_plain then
        v_run := array(select generate_series(v_cursor + 1, v_frontier));
    end if;
    v_is_all := not p_apart and v_is_whole and (v_is_plain or cardinality(v_run) = v_frontier - v_cursor);
    if p_apart and v_run is not null then
        with apart as (
            insert into {schema}.claim (id, group_id, host_id, pending)
            select nextval('{schema_text}.claim_id'), p_group, p_host, int8multirange(int8range(m, m, '[]'))
            from unnest(v_run) as m
            returning id, lower(pending) as message
        )
        select array_agg(message), array_agg(id) into v_run, v_apart from apart;
    elsif v_is_all then
        insert into {schema}.claim (id, group_id, host_id, pending)
        values (v_claim, p_group, p_host, int8multirange(int8range(v_cursor + 1, v_frontier, '[]')));
    elsif v_run is not null then
        insert into {schema}.claim (id, group_id, host_id, pending)
        select v_claim, p_group, p_host, range_agg(int8range(id, id, '[]')) from unnest(v_run) as id having count(*) > 0;
    end if;

    if v_held_keys <> '{}' or v_keyed_ids is not null or exists (
        select from {schema}.exception
        where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_exceptions) as at))
            and (concurrency <> 'parallel' or compaction_rank is not null))
    then
        perform set_config('synchronous_commit', v_durable, true);
    end if;
    if exists (select from {schema}.skipped_versions where group_id = p_group) then
        with gone as (                          -- told with the delivery that comes now
            delete from {schema}.skipped_versions s using (
                select message_key from unnest(v_keyed_ids, v_keyed_keys, v_keyed_compacted) as f (id, message_key, compacted)
                where compacted and id in (select unnest(v_keyed_run))
                union
                select message_key from {schema}.exception
                where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_exceptions) as at))
                    and compaction_rank is not null
            ) as k
            where s.group_id = p_group and s.message_key = k.message_key
            returning s.message_key, s.versions
        )
        select array_agg(message_key), array_agg(versions) into v_skip_keys, v_skip_versions from gone;
    end if;

    if v_is_all and (v_is_plain or v_skip_keys is null) then    -- what is plain is not compacted
        return query execute format(
            'select 1::smallint, null::text, null::bigint[], null::bigint[], null::bigint, $1, id, message_key, compaction_rank,
                routing_key, headers::text, content_type, payload, (date_part(''epoch'', created_at) * 1000)::bigint,
                0, false, id <= $2, least(concurrency, $5)::text, lane, 0::bigint, case
                    when $6 and concurrency = ''ordered'' then {schema_format}.gap_since($7, message_key, lane, id) end
            from {schema_format}.%I where id > $3 and id <= $4 order by id', v_partition)
        using v_claim, v_replay_upto, v_cursor, v_frontier, p_override, p_marks_gaps, p_group;
    elsif v_run is not null then
        return query
        select 1::smallint, null::text, null::bigint[], null::bigint[], null::bigint, coalesce(r.claim, v_claim), m.id, m.message_key,
            m.compaction_rank, m.routing_key, m.headers::text, m.content_type, m.payload, (date_part('epoch', m.created_at) * 1000)::bigint,
            0, false, m.id <= v_replay_upto, least(m.concurrency, p_override)::text, m.lane, coalesce(s.versions, 0), case
                when p_marks_gaps and m.concurrency = 'ordered' then {schema}.gap_since(p_group, m.message_key, m.lane, m.id) end
        from (
            select * from {schema}.log_between_{stream_id}(v_cursor, v_frontier)
            union all
            select * from {schema}.log_rows_{stream_id}(v_late) where v_late is not null
        ) as m
        join unnest(v_run, v_apart) as r (id, claim) on r.id = m.id
        left join unnest(v_skip_keys, v_skip_versions) as s (message_key, versions)
            on m.compaction_rank is not null and s.message_key = m.message_key;
    end if;

    if v_exceptions <> '{}' then
        return query
        with due as materialized (              -- each with its message, from the log or from its dead letter's copy
            select e.ctid as at, e.message_id, e.message_key, e.failures, e.dead_letter_id, e.replay, e.concurrency, e.lane, e.skipped, e.last_digest,
                l.id is not null or d.id is not null as is_there, coalesce(l.compaction_rank, d.compaction_rank) as compaction_rank,
                coalesce(l.routing_key, d.routing_key) as routing_key, coalesce(l.headers, d.headers) as headers,
                coalesce(l.content_type, d.content_type) as content_type, coalesce(l.payload, d.payload) as payload,
                coalesce(l.created_at, d.produced_at) as produced_at
            from {schema}.exception e
            left join {schema}.log_rows_{stream_id}(v_exceptions) l on l.id = e.message_id
            left join {schema}.dead_letter d on d.id = e.dead_letter_id
            where e.ctid = any (array(select at from {schema}.exceptions_at(p_group, v_exceptions) as at))
        ),
        vanished as (                           -- somebody removed the message by hand: it ends, and says so
            delete from {schema}.exception where ctid = any (array(select at from due where not is_there))
        ),
        dead as (
            insert into {schema}.dead_letter (group_id, stream_id, message_id, attempts, class, error, digest, message_key,
                lane, concurrency, produced_at)
            select p_group, {stream_id}, message_id, failures, 'host', 'the message is no longer in the log, so it cannot be delivered again',
                last_digest, message_key, lane, concurrency, clock_timestamp()
            from due where not is_there
            on conflict on constraint dead_letter_once do nothing
        )
        select 2::smallint, null::text, null::bigint[], null::bigint[], null::bigint, v_claim, t.message_id, t.message_key,
            t.compaction_rank, t.routing_key, t.headers::text, t.content_type, t.payload,
            (extract(epoch from t.produced_at) * 1000)::bigint, t.failures, t.dead_letter_id is not null,
            t.replay or (t.dead_letter_id is null and t.message_id <= v_replay_upto),
            t.concurrency::text, t.lane, t.skipped + coalesce(s.versions, 0), case
                when p_marks_gaps and t.concurrency = 'ordered' then {schema}.gap_since(p_group, t.message_key, t.lane, t.message_id) end
        from due t
        left join unnest(v_skip_keys, v_skip_versions) as s (message_key, versions)
            on t.compaction_rank is not null and s.message_key = t.message_key
        where t.is_there;
    end if;

    if v_held_keys <> '{}' then                 -- after what has vanished is known
        perform {schema}.release_keys(p_group, p_host, array_agg(message_key), array_agg(lane))
        from (
            select * from unnest(v_held_keys, v_held_lanes) as k (message_key, lane)
            except
            select message_key, lane from {schema}.exception
            where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_exceptions) as at)) and message_key is not null
            except
            select message_key, lane from unnest(v_keyed_ids, v_keyed_keys, v_keyed_lanes) as f (id, message_key, lane)
            where id in (select unnest(v_keyed_run))
        ) as idle;
    end if;
    return query select * from {schema}.turn_note(v_note, v_settled, v_ran, v_frontier, v_cursor);
end
$$;

-- Has anything appeared in the group's gaps, or is one of them decided? The producers are read before the gaps, so what
-- is missed here is found by the next look. Called by groups_with_work.
create or replace function {schema}.has_late_{stream_id}(p_group integer, p_gap_floor bigint) returns boolean
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
            where group_id = p_group and id >= p_gap_floor and not ((v_prepared or v_live && holders) and not isempty(missing)))
        or exists (select from {schema}.log_in_gaps_{stream_id}(p_group, p_gap_floor, 0));
end
$$;
