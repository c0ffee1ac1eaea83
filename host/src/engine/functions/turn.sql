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
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
begin
    with idle as materialized (
        select l.message_key, l.lane, l.paused_at is not null or exists (
            select from {schema}.exception e
            where e.group_id = p_group and e.message_key = k.message_key and e.lane = k.lane and e.state = 'deferred') as stays
        from unnest(p_keys, p_lanes) as k (message_key, lane)
        join {schema}.message_key_lease l on l.group_id = p_group and l.message_key = k.message_key and l.lane = k.lane
        where l.host_id = p_host
    ),
    ready as (
        update {schema}.message_key_lease l set host_id = null, changed_at = clock_timestamp()
        from idle i where i.stays and l.group_id = p_group and l.message_key = i.message_key and l.lane = i.lane
    )
    delete from {schema}.message_key_lease l
    using idle i where not i.stays and l.group_id = p_group and l.message_key = i.message_key and l.lane = i.lane;
end
$$;

-- Ends versions that have lost to a newer one. They are counted for the key's next delivery; a redriven one gives up its
-- dead letter; a key that waits for one of them is ready.
create or replace function {schema}.pass_over(p_group integer, p_messages bigint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
begin
    with gone as (
        delete from {schema}.exception where group_id = p_group and message_id = any (p_messages)
        returning message_id, message_key, lane, skipped, dead_letter_id
    ),
    forgotten as (
        delete from {schema}.dead_letter d using gone g where d.id = g.dead_letter_id and d.group_id = p_group
    ),
    ready as (
        update {schema}.message_key_lease l set blocked_by = null, changed_at = clock_timestamp()
        from gone g
        where l.group_id = p_group and l.message_key = g.message_key and l.lane = g.lane and l.blocked_by = g.message_id
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
