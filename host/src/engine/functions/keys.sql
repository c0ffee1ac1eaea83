-- Message keys inside a turn: who may run what of a key. Installed by `engine::functions` for every stream; called by the
-- turn in functions/claim.sql, which holds the group's advisory lock. The states of a key stand at message_key_lease in
-- the migrations.
--
-- Each has one plan, made while the tables may be empty and kept when they are not, so none of them may scan one.
--
-- One message of a key at a time holds because one host has the key, and that host runs its messages one by one. Order
-- holds because a message goes into a host's queue only when nothing of its key is deferred; else it is deferred itself.

-- Takes what is deferred behind keys that this host has and that have nothing left to run here: the oldest first, at most
-- p_lane_max of a key, p_want and p_want_bytes in all, but always one. Versions that lost to a newer one end here. What a host died with, and what is
-- compacted, is taken alone: the first, so that a message that kills hosts costs those behind it no attempt; the second,
-- so that the newest version is looked up when the one before has ended. An ordered head whose time has not come blocks
-- its key. Index: exception_deferred.
create or replace function {schema}.take_deferred_{stream_id}(
    p_group integer,
    p_host bigint,
    p_claim bigint,
    p_keys text[],
    p_lanes smallint[],
    p_lane_max integer,
    p_want integer,
    p_want_bytes bigint
) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_sort = off
as $$
declare
    v_taken bigint[];
    v_lost bigint[];
    v_waits bigint[];                           -- first of their keys, and not due
    -- Of many keys few messages each, or hundreds would be looked at for each that is taken.
    v_each integer := least(p_lane_max, greatest(8, 2 * p_want / greatest(cardinality(p_keys), 1)));
begin
    with queue as materialized (
        select e.*, e.failures > 0 or e.compaction_rank is not null as is_alone,
            coalesce(e.due_at <= clock_timestamp(), true) as is_due,
            (e.compaction_rank is not null and e.message_id <> (
                select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = e.message_key)) is true as is_lost
        from unnest(p_keys, p_lanes) as k (message_key, lane)
        cross join lateral (
            select host_id, paused_at from {schema}.message_key_lease
            where group_id = p_group and message_key = k.message_key and lane = k.lane offset 0
        ) as l
        cross join lateral (
            select message_id, message_key, lane, due_at, failures, compaction_rank
            from {schema}.deferred_behind(p_group, k.message_key, k.lane, v_each + 1)
        ) as e
        where l.host_id = p_host and l.paused_at is null
    ),
    live as materialized (
        select *, row_number() over line as place,
            not is_due or row_number() over line > 1 and (is_alone or lag(is_alone) over line) as is_end
        from queue where not is_lost
        window line as (partition by message_key, lane order by message_id)
    ),
    taken as materialized (
        select message_id, place from (
            select message_id, place, bool_or(is_end) over (partition by message_key, lane order by message_id) as is_behind from live
        ) as l
        where not is_behind and place <= v_each
        order by place, message_id limit p_want
    )
    select (select array_agg(message_id order by place, message_id) from taken), (select array_agg(message_id) from queue where is_lost),
        (select array_agg(message_id) from live where place = 1 and not is_due)
    into v_taken, v_lost, v_waits;
    if v_waits is not null then                 -- only an ordered one is deferred with a time
        with waits as (
            update {schema}.exception set state = 'delayed'
            where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_waits) as at))
            returning message_id, message_key, lane
        )
        update {schema}.message_key_lease l set host_id = null, blocked_by = w.message_id, changed_at = clock_timestamp()
        from waits w where l.group_id = p_group and l.message_key = w.message_key and l.lane = w.lane;
    end if;
    if v_lost is not null then
        perform {schema}.pass_over(p_group, v_lost);
    end if;
    if v_taken is null then
        return '{}';
    end if;
    select array_agg(message_id) into v_taken   -- the size of a payload is known without reading it
    from (
        select t.message_id, t.n, sum(coalesce(octet_length(l.payload), 0)) over (order by t.n) as bytes
        from unnest(v_taken) with ordinality as t (message_id, n)
        left join {schema}.log_rows_{stream_id}(v_taken) l on l.id = t.message_id
    ) as sized
    where n = 1 or bytes <= p_want_bytes;
    with running as (
        update {schema}.exception set state = 'running', due_at = null, host_id = p_host, claim_id = p_claim
        where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_taken) as at))
        returning message_id
    )
    select array_agg(message_id) into v_taken from running;
    return coalesce(v_taken, '{}');
end
$$;

-- Takes retries and delayed messages that are due. An exclusive one needs its key: it leases it, or is deferred behind
-- it and, being the oldest, runs next. An ordered one blocks its key, which this host then has. A version that has lost
-- meanwhile ends here. Index: exception_due.
create or replace function {schema}.take_due_{stream_id}(p_group integer, p_host bigint, p_claim bigint, p_want integer)
returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
    v_due bigint[];
    v_keyed boolean;
    v_lost bigint[];
    v_deferred bigint[];
begin
    select array_agg(message_id), bool_or(concurrency <> 'parallel' or compaction_rank is not null) into v_due, v_keyed
    from (
        select message_id, concurrency, compaction_rank from {schema}.exception
        where group_id = p_group and state in ('waiting', 'delayed') and due_at <= clock_timestamp()
        order by due_at limit p_want for update skip locked
    ) as due;
    if v_due is null then
        return '{}';
    end if;
    if v_keyed then
        select array_agg(e.message_id) into v_lost
        from {schema}.exception e
        where e.ctid = any (array(select at from {schema}.exceptions_at(p_group, v_due) as at)) and e.compaction_rank is not null and e.message_id <> (
            select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = e.message_key);
        if v_lost is not null then
            perform {schema}.pass_over(p_group, v_lost);
        end if;
        with due as materialized (
            select e.ctid as at, l.at as lease_at, l.rests, e.message_id, e.message_key, e.lane, l.message_key is not null as is_leased,
                l.blocked_by, l.blocked_by is not distinct from e.message_id and l.paused_at is null as is_head,
                row_number() over (partition by e.message_key, e.lane order by e.message_id) as place
            from {schema}.exception e
            left join lateral (
                select ctid as at, message_key, blocked_by, paused_at, rests from {schema}.message_key_lease
                where group_id = p_group and message_key = e.message_key and lane = e.lane offset 0
            ) as l on true
            where e.ctid = any (array(select at from {schema}.exceptions_at(p_group, v_due) as at)) and e.concurrency <> 'parallel'
        ),
        leased as (
            insert into {schema}.message_key_lease (group_id, message_key, lane, host_id)
            select p_group, message_key, lane, p_host from due where not is_leased and place = 1
        ),
        taken_over as (
            update {schema}.message_key_lease set host_id = p_host, blocked_by = null, changed_at = clock_timestamp()
            where ctid = any (array(select lease_at from due where is_head))
        ),
        unblocked as (                          -- a paused key: its head waits with the others
            update {schema}.message_key_lease set blocked_by = null, changed_at = clock_timestamp()
            where ctid = any (array(select lease_at from due where blocked_by = message_id and not is_head))
        ),
        buried as (                             -- behind a resting key it dies
            update {schema}.message_key_lease set buries = true where ctid = any (array(select lease_at from due where rests))
        ),
        deferred as (
            update {schema}.exception set state = 'deferred', due_at = null
            where ctid = any (array(select at from due where case when is_leased then not is_head else place > 1 end))
            returning message_id
        )
        select array_agg(message_id) into v_deferred from deferred;
    end if;
    with taken as (
        update {schema}.exception e set state = 'running', due_at = null, host_id = p_host, claim_id = p_claim
        where e.ctid = any (array(select at from {schema}.exceptions_at(p_group, v_due) as at)) and e.state in ('waiting', 'delayed')
        returning e.message_id
    )
    select coalesce(array_agg(message_id), '{}') into v_due from taken;
    return v_due;
end
$$;

-- What becomes of fresh messages that have a key mode or are compacted; answers those to run now. Per key, in id order:
--   lost            a version that is not its key's winner ends here
--   no key mode     runs
--   key free        the first leases it for this host and runs, those behind it too, into this host's queue
--   key ours        into this host's queue, unless that is full or something of the key is deferred
--   else            deferred; and so is a version behind another message of its key, to be looked up when that has ended
-- An ordered message whose time has not come blocks its key; others whose time has not come are delayed by themselves.
create or replace function {schema}.lease_fresh_{stream_id}(
    p_group integer,
    p_host bigint,
    p_ids bigint[],
    p_keys text[],
    p_lanes smallint[],
    p_modes {schema}.concurrency[],
    p_compacted boolean[],
    p_due timestamptz[],                        -- null: now
    p_full_keys text[],
    p_full_lanes smallint[],
    p_lane_max integer
) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_sort = off
as $$
declare
    v_lost bigint[];
    v_run bigint[];
begin
    if p_compacted @> array[true] then
        select array_agg(f.id) into v_lost
        from unnest(p_ids, p_keys, p_compacted) as f (id, message_key, compacted)
        where f.compacted and f.id <> (
            select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = f.message_key);
        if v_lost is not null then
            insert into {schema}.skipped_versions as s (group_id, message_key, versions)
            select p_group, message_key, count(*) from unnest(p_ids, p_keys) as f (id, message_key)
            where id = any (v_lost) group by message_key
            on conflict (group_id, message_key) do update set versions = s.versions + excluded.versions;
        end if;
        -- A settle that blocks its key with an older version, and has not seen the newer one, ends first.
        perform from {schema}.message_key_lease l
        where l.ctid = any (array(
            select at from unnest(p_keys, p_lanes, p_compacted) as f (message_key, lane, compacted)
            cross join lateral {schema}.leases_at(p_group, array[f.message_key], array[f.lane]) as at where f.compacted))
        order by l.message_key, l.lane for update of l;
        -- A newer version replaces the one that is deferred, and unblocks a key that waits for an older one.
        perform {schema}.pass_over(p_group, array_agg(e.message_id))
        from unnest(p_ids, p_keys, p_compacted) as f (id, message_key, compacted)
        cross join lateral (
            select message_id, compaction_rank from {schema}.exception
            where group_id = p_group and message_key >= f.message_key and message_key <= f.message_key -- see deferred_behind
                and state = 'deferred' order by message_key, lane, message_id offset 0
        ) as e
        where f.compacted and e.compaction_rank is not null and f.id <> all (coalesce(v_lost, '{}')) having count(*) > 0;
        perform {schema}.unblock_lost_{stream_id}(p_group, array_agg(f.message_key))
        from unnest(p_ids, p_keys, p_compacted) as f (id, message_key, compacted)
        where f.compacted and f.id <> all (coalesce(v_lost, '{}')) having count(*) > 0;
    end if;

    with fresh as materialized (
        select n, id, message_key, lane, mode, compacted, due, due is null as is_due
        from unnest(p_ids, p_keys, p_lanes, p_modes, p_compacted, p_due) with ordinality
            as f (id, message_key, lane, mode, compacted, due, n)
        where v_lost is null or id not in (select unnest(v_lost))
    ),
    line as materialized (                      -- what is subject to its key, a row for each key
        select message_key, lane, array_agg(n::integer) as places, bool_and(is_due and not compacted) and count(*) <= p_lane_max as is_plain
        from fresh where mode = 'ordered' or mode = 'exclusive' and is_due
        group by message_key, lane
    ),
    keys as materialized (                      -- and how it stands. All messages of one that `goes_on` run
        select *, is_plain and (not is_leased or is_ours) as goes_on
        from (
            select l.message_key, l.lane, l.places, l.is_plain, coalesce(k.is_leased, false) as is_leased, k.lease_at, k.rests,
                coalesce(k.is_ours and (l.message_key, l.lane) not in (select * from unnest(p_full_keys, p_full_lanes)), false) as is_ours
            from line l
            left join lateral (
                select true as is_leased, k.ctid as lease_at, k.rests, k.host_id is not distinct from p_host and k.paused_at is null and (  -- see release_keys
                        select true from {schema}.deferred_behind(p_group, l.message_key, l.lane, 1)
                    ) is null as is_ours
                from {schema}.message_key_lease k
                where k.group_id = p_group and k.message_key = l.message_key and k.lane = l.lane offset 0
            ) as k on true
        ) as l
    ),
    judged as materialized (                    -- of the other keys each message by itself
        select *, bool_or(is_leased and not is_ours or not is_due or place > p_lane_max or compacted and (place > 1 or is_leased))
            over (partition by message_key, lane order by place) as is_behind
        from (
            select k.message_key, k.lane, k.is_leased, k.is_ours, p_ids[n] as id, p_modes[n] as mode, p_compacted[n] as compacted,
                p_due[n] as due, p_due[n] is null as is_due,
                row_number() over (partition by k.message_key, k.lane order by p_ids[n]) as place
            from keys k, unnest(k.places) as n where not k.goes_on
        ) as f
    ),
    buried as (                                 -- what is deferred behind a resting key dies
        update {schema}.message_key_lease set buries = true where ctid = any (array(select lease_at from keys where rests))
    ),
    leased as (
        insert into {schema}.message_key_lease (group_id, message_key, lane, host_id, blocked_by)
        select p_group, message_key, lane, p_host, null from keys where goes_on and not is_leased
        union all
        select p_group, message_key, lane, case when not is_behind then p_host end, case when is_behind then id end
        from judged where place = 1 and not is_leased
    ),
    waiting as (
        insert into {schema}.exception (group_id, message_id, state, due_at, message_key, lane, concurrency, compaction_rank)
        select p_group, id, case when place = 1 and not is_leased then 'delayed' else 'deferred' end::{schema}.exception_state,
            due, message_key, lane, mode, case when compacted then 0 end
        from judged where is_behind
        union all
        select p_group, id, 'delayed', due, message_key, lane, mode, case when compacted then 0 end
        from fresh where not is_due and mode <> 'ordered'
        on conflict (group_id, message_id) do nothing -- it was redriven as well
    )
    select coalesce(array_agg(id), '{}') into v_run
    from (
        select p_ids[n] as id from keys, unnest(places) as n where goes_on
        union all
        select id from judged where not is_behind
        union all
        select id from fresh where mode = 'parallel' and is_due
    ) as run;
    return v_run;
end
$$;

-- Unblocks keys that wait for a version that has lost: it ends, wherever it waits; as a dead letter it stays one.
create or replace function {schema}.unblock_lost_{stream_id}(p_group integer, p_keys text[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
    v_lost bigint[];
begin
    with blocked as materialized (
        select l.at, l.blocked_by
        from (select distinct message_key from unnest(p_keys) as k (message_key)) as k
        cross join lateral (
            select ctid as at, message_key, blocked_by from {schema}.message_key_lease
            where group_id = p_group and message_key = k.message_key offset 0
        ) as l
        left join {schema}.exception e on e.group_id = p_group and e.message_id = l.blocked_by
        left join {schema}.dead_letter d on d.group_id = p_group and d.message_id = l.blocked_by
        where l.blocked_by is not null and coalesce(e.compaction_rank, d.compaction_rank) is not null
            and l.blocked_by <> (select h.message_id from {schema}.compaction_head_{stream_id} h where h.message_key = l.message_key)
    ),
    ready as (
        update {schema}.message_key_lease set blocked_by = null, changed_at = clock_timestamp()
        where ctid = any (array(select at from blocked))
    )
    select array_agg(blocked_by) into v_lost from blocked;
    if v_lost is not null then
        perform {schema}.pass_over(p_group, v_lost);
    end if;
end
$$;

-- Buries what is deferred behind resting keys, in order, at most 500 messages a turn. What was redriven waits there for
-- the key's release.
create or replace function {schema}.bury_resting_{stream_id}(p_group integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
declare
    v_key text;
    v_lane smallint;
    v_dying bigint[];
begin
    select message_key, lane into v_key, v_lane from {schema}.message_key_lease
    where group_id = p_group and host_id is null and blocked_by is null and paused_at is null and rests and buries limit 1;
    if not found then
        return;
    end if;
    select array_agg(message_id) into v_dying
    from (
        select message_id from {schema}.exception
        where group_id = p_group and message_key = v_key and lane = v_lane and state = 'deferred' and dead_letter_id is null
        order by message_id limit 500
    ) as d;
    if coalesce(cardinality(v_dying), 0) < 500 then
        update {schema}.message_key_lease set buries = false where group_id = p_group and message_key = v_key and lane = v_lane;
    end if;
    if v_dying is null then
        return;
    end if;
    with gone as (
        delete from {schema}.exception
        where ctid = any (array(select at from {schema}.exceptions_at(p_group, v_dying) as at)) returning *
    )
    insert into {schema}.dead_letter as d (group_id, stream_id, message_id, attempts, class, error, message_key, lane, concurrency,
        compaction_rank, routing_key, headers, content_type, payload, produced_at, deliver_after)
    select p_group, {stream_id}, g.message_id, g.failures, 'key_rests', 'an earlier message of its key is a dead letter, and the group says on_dead_letter = "rest"',
        g.message_key, g.lane, g.concurrency, l.compaction_rank, l.routing_key, l.headers, l.content_type, l.payload,
        coalesce(l.created_at, clock_timestamp()), l.deliver_after
    from gone g left join {schema}.log_rows_{stream_id}(v_dying) l on l.id = g.message_id
    order by g.message_id
    on conflict on constraint dead_letter_once do update
    set attempts = excluded.attempts, class = excluded.class, error = excluded.error, deaths = d.deaths + 1,
        died_at = clock_timestamp(), redriven_at = null, replayed_at = null;
end
$$;
