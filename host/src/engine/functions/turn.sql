-- What all groups' turns share, whatever their stream. Installed by `engine::functions`; called by functions/claim.sql,
-- functions/keys.sql and engine::settle.

-- The first row of a turn's answer.
create or replace function {schema}.turn_note(p_note text, p_settled bigint[], p_ran bigint[], p_frontier bigint, p_cursor bigint)
returns table (
    source smallint, note text, settled bigint[], ran bigint[], frontier bigint, claim_id bigint, message_id bigint,
    message_key text, compaction_rank bigint, routing_key text, headers text, content_type text, payload bytea,
    produced_at_ms bigint, failures integer, redriven boolean, replay boolean, concurrency text, lane smallint, skipped bigint,
    gap_since bigint
)
language sql immutable
as $$
    select 0::smallint, p_note, p_settled, p_ran, p_frontier, null::bigint, p_cursor, null, null::bigint, null, null, null, null::bytea,
        null::bigint, null::integer, null::boolean, null::boolean, null, null::smallint, null::bigint, null::bigint
$$;

-- Where exceptions stand, by their messages, for a change of just these. Each is looked up by itself through the primary
-- key, and the change names places (`ctid = any (...)`): no plan of it can walk through all that a group has. A join can,
-- from the table's side, and does when the planner has seen the table empty, as it often is, and keeps its plan: 72 ms a
-- turn behind 40,000 deferred messages, instead of 4.
create or replace function {schema}.exceptions_at(p_group integer, p_messages bigint[]) returns setof tid
language sql stable rows 100
as $$
    select e.at from unnest(p_messages) as m (id)
    cross join lateral (select ctid from {schema}.exception where group_id = p_group and message_id = m.id offset 0) as e (at)
$$;

-- The same for leases, by key and lane.
create or replace function {schema}.leases_at(p_group integer, p_keys text[], p_lanes smallint[]) returns setof tid
language sql stable rows 100
as $$
    select l.at from unnest(p_keys, p_lanes) as k (message_key, lane)
    cross join lateral (
        select ctid from {schema}.message_key_lease
        where group_id = p_group and message_key = k.message_key and lane = k.lane offset 0
    ) as l (at)
$$;

-- What is deferred behind a key (or a lane of it), oldest first. Asked by the bounds of exception_deferred and in its order,
-- which no other index has: asked with `=`, the planner takes a walk through all that the group has, by the primary key, for
-- as cheap when most of it is behind one key: 11 s a turn for 999 idle keys beside 100,000 messages of another. Who asks
-- sets enable_sort off: a planner that has seen one row would walk and sort.
create or replace function {schema}.deferred_behind(p_group integer, p_key text, p_lane smallint, p_max integer)
returns setof {schema}.exception
language sql stable rows 10
as $$
    select * from {schema}.exception
    where group_id = p_group and state = 'deferred'
        and (message_key, lane) >= (p_key, p_lane) and (message_key, lane) <= (p_key, p_lane)
    order by message_key, lane, message_id limit p_max
$$;

-- Takes messages out of their claims. Answers the claims that still were the host's with all these messages pending; of the
-- others nothing was settled: a settle done twice changes nothing. The claims are locked first, in order: two settles of
-- one claim at once then see each other's work, and cannot deadlock. Index: claim primary key.
create or replace function {schema}.settle_claims(p_group integer, p_host bigint, p_claims bigint[], p_ids bigint[])
returns setof bigint
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
begin
    return query
    with leaving as (
        select claim_id, range_agg(int8range(message_id, message_id, '[]')) as ids
        from unnest(p_claims, p_ids) as l (claim_id, message_id)
        group by claim_id
    ),
    locked as materialized (
        select c.id, c.pending, l.ids
        from {schema}.claim c join leaving l on l.claim_id = c.id
        where c.host_id = p_host and c.group_id = p_group and c.pending @> l.ids
        order by c.id
        for update of c
    ),
    emptied as (
        delete from {schema}.claim c using locked k where c.id = k.id and k.pending = k.ids
        returning c.id
    ),
    shrunk as (
        update {schema}.claim c set pending = k.pending - k.ids from locked k where c.id = k.id and k.pending <> k.ids
        returning c.id
    )
    select id from emptied union all select id from shrunk;
end
$$;

-- Lets keys go that a host has and no longer needs: free, or ready for any host when something is deferred behind them.
-- The caller holds the group's advisory lock.
create or replace function {schema}.release_keys(p_group integer, p_host bigint, p_keys text[], p_lanes smallint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_sort = off
as $$
begin
    with idle as materialized (
        select l.ctid as at, l.paused_at is not null or (  -- not EXISTS, which may be answered from a list of all keys
            select true from {schema}.deferred_behind(p_group, l.message_key, l.lane, 1)
        ) is not null as stays
        from {schema}.message_key_lease l
        where l.ctid = any (array(select at from {schema}.leases_at(p_group, p_keys, p_lanes) as at)) and l.host_id = p_host
    ),
    ready as (
        update {schema}.message_key_lease set host_id = null, changed_at = clock_timestamp()
        where ctid = any (array(select at from idle where stays)) and host_id = p_host
    )
    delete from {schema}.message_key_lease where ctid = any (array(select at from idle where not stays)) and host_id = p_host;
end
$$;

-- Ends versions that have lost to a newer one. They are counted for the key's next delivery; a redriven one gives up its
-- dead letter; a key that waits for one of them is ready.
create or replace function {schema}.pass_over(p_group integer, p_messages bigint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
begin
    with gone as (
        delete from {schema}.exception
        where ctid = any (array(select at from {schema}.exceptions_at(p_group, p_messages) as at))
        returning message_id, message_key, lane, skipped, dead_letter_id
    ),
    forgotten as (
        delete from {schema}.dead_letter d using gone g where d.id = g.dead_letter_id and d.group_id = p_group
    ),
    ready as (
        update {schema}.message_key_lease set blocked_by = null, changed_at = clock_timestamp()
        where ctid = any (array(
            select l.at from gone g cross join lateral (
                select ctid, blocked_by from {schema}.message_key_lease
                where group_id = p_group and message_key = g.message_key and lane = g.lane offset 0
            ) as l (at, blocked_by)
            where l.blocked_by = g.message_id))
    )
    insert into {schema}.skipped_versions as s (group_id, message_key, versions)
    select p_group, message_key, sum(skipped + 1) from gone group by message_key
    on conflict (group_id, message_key) do update set versions = s.versions + excluded.versions;
end
$$;

-- The first dead letter of an ordered key (or lane of it) before a message, if one is open. Index: dead_letter_key.
create or replace function {schema}.gap_since(p_group integer, p_key text, p_lane smallint, p_message bigint) returns bigint
language sql stable
as $$
    select message_id from {schema}.dead_letter
    where group_id = p_group and message_key = p_key and lane = p_lane and concurrency = 'ordered' and redriven_at is null
        and replayed_at is null
        and message_id < p_message
    order by message_id limit 1
$$;
