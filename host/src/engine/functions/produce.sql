-- Produce to one stream. Installed by `engine::functions` for every stream; called through produce_batch.
-- Runs as its owner, so EXECUTE on it is all a producer needs.
--
-- Order of locking: the stream (shared), idempotency keys (sorted), ordered keys (sorted by lock), heads (sorted by key).
-- Everybody takes them in this order, so two calls cannot deadlock. Several calls of one transaction can, and get 40P01.
create or replace function {schema}.produce_{stream_id}(
    p_payloads bytea[],
    p_keys text[],
    p_concurrencies text[],
    p_compactions boolean[],
    p_ranks bigint[],
    p_idempotency_keys text[],
    p_routing_keys text[],
    p_headers jsonb[],
    p_content_types text[],
    p_deliver_afters timestamptz[]
) returns table (ordinal integer, id bigint, duplicate boolean, superseded boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_stream {schema}.stream;
    v_count integer := cardinality(p_payloads);
    v_drawn integer;                            -- ids at most: those of the short way may be burnt
    v_last bigint;
    v_edge bigint;
    v_modes {schema}.concurrency[];             -- null: every message is parallel and not compacted
    v_ranks bigint[];
    v_lanes smallint[];
    v_is_once boolean := p_idempotency_keys is not null and array_remove(p_idempotency_keys, null) <> '{}';
begin
    select * into v_stream from {schema}.stream where id = {stream_id};
    perform {schema}.check_batch(v_stream.max_payload_bytes, p_payloads, p_keys, p_concurrencies, p_compactions, p_ranks,
        p_idempotency_keys, p_routing_keys, p_headers, p_content_types, p_deliver_afters);
    if v_count = 0 then
        return;
    end if;

    -- Before an id is drawn; held to the end of the transaction. The claim's gap rule reads it from pg_locks.
    perform pg_advisory_xact_lock_shared({lock_class}, {stream_id});

    -- Every quarter of a partition somebody looks whether enough of them lie ahead, sixteen times before the edge; and
    -- every call that would run past the edge attaches them first. So the stream goes on after a transaction that
    -- extended it and was rolled back only when all that lay ahead was used up.
    select s.last_value, coalesce((
        select p.upper_id from {schema}.log_partition p where p.stream_id = {stream_id} order by p.lower_id desc limit 1), 1)
    into v_last, v_edge from {schema}.message_log_{stream_id}_id s;
    v_drawn := case when v_is_once then 2 * v_count else v_count end;
    if v_last + v_drawn >= v_edge
        or (v_last + v_drawn + 4 * v_stream.partition_rows > v_edge
            and v_last / (v_stream.partition_rows / 4) <> (v_last + v_drawn) / (v_stream.partition_rows / 4))
    then
        perform {schema}.extend_log({stream_id}, (8 + v_drawn / v_stream.partition_rows)::integer);
    end if;

    if array_remove(p_keys, null) <> '{}' then
        select modes, ranks, lanes into v_modes, v_ranks, v_lanes
        from {schema}.key_modes({stream_id}, p_keys, p_concurrencies, p_compactions, p_ranks);
    end if;

    if v_modes is null and not v_is_once then
        return query
        with stored as (
            insert into {schema}.message_log_{stream_id}
                (id, payload, message_key, routing_key, headers, content_type, deliver_after)
            select nextval('{schema_text}.message_log_{stream_id}_id'), m.*  -- drawn in array order
            from (select unnest(p_payloads), unnest(p_keys), unnest(p_routing_keys), unnest(p_headers),  -- copies nothing
                unnest(p_content_types), unnest(p_deliver_afters)) as m
            returning id
        )
        select (row_number() over ())::integer, id, false, false from stored;
    else
        return query select * from {schema}.produce_chosen_{stream_id}(p_payloads, p_keys, v_modes, v_ranks, v_lanes, p_ranks,
            case when v_is_once then p_idempotency_keys end, p_routing_keys, p_headers, p_content_types, p_deliver_afters,
            v_stream.idempotency_ttl_ms);
    end if;
end
$$;

-- The same for a batch in which callers gave idempotency keys, or key modes hold: only what is new is stored, and only
-- once its keys are locked.
create or replace function {schema}.produce_chosen_{stream_id}(
    p_payloads bytea[],
    p_keys text[],
    p_modes {schema}.concurrency[],
    p_ranks bigint[],                           -- null where not compacted
    p_lanes smallint[],
    p_asked_ranks bigint[],                     -- as the caller gave them
    p_idempotency_keys text[],
    p_routing_keys text[],
    p_headers jsonb[],
    p_content_types text[],
    p_deliver_afters timestamptz[],
    p_ttl_ms bigint
) returns table (ordinal integer, id bigint, duplicate boolean, superseded boolean)
-- One plan, which must not scan the keys that are remembered, however few they were when it was made.
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    v_count integer := cardinality(p_payloads);
    v_uuids uuid[];
    v_ordinals bigint[];                        -- what is to be stored, and under which ids
    v_ids bigint[];
    v_lost bigint[];                            -- ids of versions that are not their key's winner
    v_is_ordered boolean := coalesce(p_modes @> array['ordered'::{schema}.concurrency], false);
begin
    if p_idempotency_keys is null then
        select array_agg(o order by o) into v_ordinals from generate_series(1::bigint, v_count) as o;
    else
        v_uuids := array(select {schema}.idempotency_uuid(once) from unnest(p_idempotency_keys) as once);
        select ordinals, ids into v_ordinals, v_ids
        from {schema}.claim_idempotency_{stream_id}(p_payloads, p_keys, p_asked_ranks, p_idempotency_keys, v_uuids,
            clock_timestamp() - p_ttl_ms * interval '1 ms', not v_is_ordered);
        if coalesce(cardinality(v_ordinals), 0) < v_count then
            -- From here on only of what is new.
            select array_agg(payload order by ordinal), array_agg(key order by ordinal), array_agg(mode order by ordinal),
                array_agg(rank order by ordinal), array_agg(lane order by ordinal), array_agg(routing_key order by ordinal),
                array_agg(headers order by ordinal), array_agg(content_type order by ordinal),
                array_agg(deliver_after order by ordinal)
            into p_payloads, p_keys, p_modes, p_ranks, p_lanes, p_routing_keys, p_headers, p_content_types, p_deliver_afters
            from unnest(p_payloads, p_keys, p_modes, p_ranks, p_lanes, p_routing_keys, p_headers, p_content_types,
                p_deliver_afters) with ordinality
                as m(payload, key, mode, rank, lane, routing_key, headers, content_type, deliver_after, ordinal)
            where ordinal = any (v_ordinals);
        end if;
    end if;

    -- For one ordered key, id order is commit order: its id is drawn under its lock.
    if v_is_ordered then
        perform {schema}.lock_ordered_keys({stream_id}, array_agg(m.lane || ':' || m.key))
        from unnest(p_keys, p_modes, p_lanes) as m(key, mode, lane)
        where m.mode = 'ordered';
    end if;
    if v_ids is null then
        select array_agg(id order by ordinal) into v_ids
        from (
            select ordinal, nextval('{schema_text}.message_log_{stream_id}_id') as id
            from (select o as ordinal from unnest(v_ordinals) as o order by o) as n
        ) as drawn;
        if v_uuids is not null then
            update {schema}.idempotency_key_{stream_id} k set message_id = n.id
            from unnest(v_ordinals, v_ids) as n(ordinal, id)
            join unnest(v_uuids) with ordinality as u(uuid, ordinal) using (ordinal)
            where k.key = u.uuid;
        end if;
    end if;

    insert into {schema}.message_log_{stream_id} (id, payload, message_key, concurrency, compaction_rank, lane, routing_key,
        headers, content_type, deliver_after)
    select m.id, m.payload, m.key, coalesce(m.mode, 'parallel'), m.rank, coalesce(m.lane, 0), m.routing_key, m.headers,
        m.content_type, m.deliver_after
    from unnest(v_ids, p_payloads, p_keys, p_modes, p_ranks, p_lanes, p_routing_keys, p_headers, p_content_types,
        p_deliver_afters) as m(id, payload, key, mode, rank, lane, routing_key, headers, content_type, deliver_after);

    if p_ranks is not null then
        with version as materialized (
            select key, rank, id, row_number() over (partition by key order by rank desc, id desc) as place
            from unnest(v_ids, p_keys, p_ranks) as m(id, key, rank)
            where rank is not null
        ),
        winner as (                             -- waits here for an open transaction that produced to the key
            insert into {schema}.compaction_head_{stream_id} as h (message_key, message_id, rank)
            select key, id, rank from version where place = 1 order by key collate "C"
            on conflict (message_key) do update set message_id = excluded.message_id, rank = excluded.rank
                where (excluded.rank, excluded.message_id) > (h.rank, h.message_id)
            returning message_id
        )
        select array_agg(id) into v_lost from version where id not in (select message_id from winner);
    end if;

    if cardinality(v_ids) = v_count and v_lost is null then
        return query select n.ordinal::integer, n.id, false, false from unnest(v_ids) with ordinality as n(id, ordinal);
        return;
    end if;
    return query
    select m.ordinal::integer,
        coalesce(n.id, (select k.message_id from {schema}.idempotency_key_{stream_id} k where k.key = v_uuids[m.ordinal])),  -- read for duplicates only
        n.id is null, coalesce(n.id = any (v_lost), false)
    from generate_series(1::bigint, v_count) as m(ordinal)
    left join unnest(v_ordinals, v_ids) as n(ordinal, id) on n.ordinal = m.ordinal
    order by m.ordinal;
end
$$;

-- Takes the idempotency keys of a batch that are not remembered, and answers which messages are new: the first of each
-- such key, and everything without one. With p_draws they get their ids here, else 0 for now. Fails where a remembered key
-- came with another message.
create or replace function {schema}.claim_idempotency_{stream_id}(
    p_payloads bytea[],
    p_keys text[],
    p_ranks bigint[],
    p_idempotency_keys text[],
    p_uuids uuid[],
    p_void timestamptz,                         -- what is older is forgotten
    p_draws boolean
) returns table (ordinals bigint[], ids bigint[])
-- One plan, which must not scan the keys that are remembered, however few they were when it was made.
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    v_count integer := cardinality(p_uuids);
    v_prints bytea[];
    v_ordinals bigint[];
    v_ids bigint[];
    v_conflict text;
begin
    -- The short way: where no key is known, and none is there twice, a plain INSERT does. ON CONFLICT would look each key up
    -- again and write it in two steps. The price is a savepoint, and beyond 64 of them a transaction makes everybody's
    -- snapshots slower, so it is for batches. It waits for an open transaction with one of the keys, and takes them in the
    -- same order as the long way. If that transaction commits, all this is undone, its ids are burnt (holes like a
    -- rollback's), and the long way finds what is new.
    if v_count >= 16
        and not exists (select from {schema}.idempotency_key_{stream_id} where key = any (p_uuids))
        and (select count(distinct uuid) = count(uuid) from unnest(p_uuids) as uuid)
    then
        if p_draws then
            v_ids := array(select nextval('{schema_text}.message_log_{stream_id}_id') from generate_series(1, v_count));
        end if;
        begin
            insert into {schema}.idempotency_key_{stream_id} (key, message_id, fingerprint)
            select uuid, coalesce(id, 0), {schema}.message_fingerprint(payload, key, rank)
            from unnest(p_uuids, v_ids, p_payloads, p_keys, p_ranks) as m(uuid, id, payload, key, rank)
            where uuid is not null order by uuid;
            return query select array(select generate_series(1::bigint, v_count)), v_ids;
            return;
        exception when unique_violation then
            null;
        end;
    end if;

    select array_agg(case when uuid is not null then {schema}.message_fingerprint(payload, key, rank) end order by ordinal)
    into v_prints
    from unnest(p_payloads, p_keys, p_ranks, p_uuids) with ordinality as m(payload, key, rank, uuid, ordinal);

    with given as materialized (
        select m.*, row_number() over (partition by uuid order by ordinal) as turn
        from unnest(p_uuids, v_prints) with ordinality as m(uuid, print, ordinal)
    ),
    -- Only these draw ids.
    drawn as materialized (
        select ordinal, uuid, print, case when p_draws then nextval('{schema_text}.message_log_{stream_id}_id') else 0 end as id
        from (
            select ordinal, uuid, print from given
            where uuid is null or (turn = 1 and not exists (
                select from {schema}.idempotency_key_{stream_id} i where i.key = uuid and i.created_at >= p_void))
            order by ordinal
        ) as fresh
    ),
    -- Waits here for an open transaction with the same key. If that one commits, this key is lost to it and its id is
    -- burnt: a hole like a rollback's.
    won as (
        insert into {schema}.idempotency_key_{stream_id} as k (key, message_id, fingerprint)
        select uuid, id, print from drawn where uuid is not null order by uuid
        on conflict (key) do update
            set message_id = excluded.message_id, fingerprint = excluded.fingerprint, created_at = excluded.created_at
            where k.created_at < p_void
        returning k.key
    )
    select array_agg(d.ordinal order by d.ordinal), array_agg(d.id order by d.ordinal) into v_ordinals, v_ids
    from drawn d where d.uuid is null or d.uuid in (select key from won);

    -- Duplicates must be of the same message. Unnested, not subscripted: an array of the caller's need not start at 1.
    if cardinality(v_ordinals) is distinct from cardinality(p_uuids) then
        select left(g.once, 200) into v_conflict
        from unnest(p_uuids, v_prints, p_idempotency_keys) with ordinality as g(uuid, print, once, ordinal)
        join {schema}.idempotency_key_{stream_id} k on k.key = g.uuid
        where k.fingerprint <> g.print and g.ordinal not in (select unnest(v_ordinals))
        order by ordinal limit 1;
    end if;
    if v_conflict is not null then
        raise exception 'idempotency key % was used for another message', quote_literal(v_conflict)
            using errcode = 'MS007',
                hint = 'The same key must come with the same payload, key and rank; give a new message a new key.';
    end if;
    return query select v_ordinals, case when p_draws then v_ids end;
end
$$;
revoke all on function {schema}.produce_{stream_id}(bytea[], text[], text[], boolean[], bigint[], text[], text[], jsonb[], text[], timestamptz[]) from public;
revoke all on function {schema}.produce_chosen_{stream_id}(bytea[], text[], {schema}.concurrency[], bigint[], smallint[], bigint[], text[], text[], jsonb[], text[], timestamptz[], bigint) from public;
revoke all on function {schema}.claim_idempotency_{stream_id}(bytea[], text[], bigint[], text[], uuid[], timestamptz, boolean) from public;
