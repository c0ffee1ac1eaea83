-- Produce to one stream. Installed by `engine::functions` for every stream; called through produce_batch.
-- Runs as its owner, so EXECUTE on it is all a producer needs.
--
-- Order of locking: the stream (shared), then idempotency keys (sorted). Everybody takes them in this order, so two
-- calls cannot deadlock.
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
    v_last bigint;
    v_edge bigint;
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
    if v_last + v_count >= v_edge
        or (v_last + v_count + 4 * v_stream.partition_rows > v_edge
            and v_last / (v_stream.partition_rows / 4) <> (v_last + v_count) / (v_stream.partition_rows / 4))
    then
        perform {schema}.extend_log({stream_id}, (8 + v_count / v_stream.partition_rows)::integer);
    end if;

    if p_idempotency_keys is null or array_remove(p_idempotency_keys, null) = '{}' then
        return query
        with stored as (
            insert into {schema}.message_log_{stream_id}
                (id, payload, message_key, routing_key, headers, content_type, deliver_after)
            select nextval('{schema_text}.message_log_{stream_id}_id'), m.*  -- drawn in array order
            from unnest(p_payloads, p_keys, p_routing_keys, p_headers, p_content_types, p_deliver_afters) as m
            returning id
        )
        select (row_number() over (order by id))::integer, id, false, false from stored;
    else
        return query select * from {schema}.produce_once_{stream_id}(p_payloads, p_keys, p_ranks, p_idempotency_keys,
            p_routing_keys, p_headers, p_content_types, p_deliver_afters, v_stream.idempotency_ttl_ms);
    end if;
end
$$;

-- The same for a batch in which callers gave idempotency keys: only what is new is stored.
create or replace function {schema}.produce_once_{stream_id}(
    p_payloads bytea[],
    p_keys text[],
    p_ranks bigint[],
    p_idempotency_keys text[],
    p_routing_keys text[],
    p_headers jsonb[],
    p_content_types text[],
    p_deliver_afters timestamptz[],
    p_ttl_ms bigint
) returns table (ordinal integer, id bigint, duplicate boolean, superseded boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_void timestamptz := clock_timestamp() - p_ttl_ms * interval '1 ms';
    v_uuids uuid[];
    v_prints bytea[];
    v_ordinals integer[];                       -- what was stored, and under which ids
    v_ids bigint[];
    v_conflict text;
begin
    select array_agg({schema}.idempotency_uuid(once) order by ordinal),
        array_agg(case when once is not null then {schema}.message_fingerprint(payload, key, rank) end order by ordinal)
    into v_uuids, v_prints
    from unnest(p_payloads, p_keys, p_ranks, p_idempotency_keys) with ordinality as m(payload, key, rank, once, ordinal);

    with given as materialized (
        select m.*, row_number() over (partition by uuid order by ordinal) as turn
        from unnest(p_payloads, p_keys, p_routing_keys, p_headers, p_content_types, p_deliver_afters, v_uuids, v_prints)
            with ordinality as m(payload, key, routing_key, headers, content_type, deliver_after, uuid, print, ordinal)
    ),
    -- The first of each key that is not remembered, and everything without a key. Only these draw ids.
    drawn as materialized (
        select ordinal, uuid, print, nextval('{schema_text}.message_log_{stream_id}_id') as id
        from (
            select ordinal, uuid, print from given
            where uuid is null or (turn = 1 and not exists (
                select from {schema}.idempotency_key_{stream_id} i where i.key = uuid and i.created_at >= v_void))
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
            where k.created_at < v_void
        returning k.key
    ),
    stored as (
        insert into {schema}.message_log_{stream_id}
            (id, payload, message_key, routing_key, headers, content_type, deliver_after)
        select d.id, g.payload, g.key, g.routing_key, g.headers, g.content_type, g.deliver_after
        from drawn d join given g using (ordinal)
        where d.uuid is null or d.uuid in (select key from won)
        order by d.id
    )
    select array_agg(d.ordinal order by d.ordinal), array_agg(d.id order by d.ordinal) into v_ordinals, v_ids
    from drawn d where d.uuid is null or d.uuid in (select key from won);

    -- Unnested, not subscripted: an array of the caller's need not start at 1.
    select left(g.once, 200) into v_conflict
    from unnest(v_uuids, v_prints, p_idempotency_keys) with ordinality as g(uuid, print, once, ordinal)
    join {schema}.idempotency_key_{stream_id} k on k.key = g.uuid
    where k.fingerprint <> g.print
    order by ordinal limit 1;
    if v_conflict is not null then
        raise exception 'idempotency key % was used for another message', quote_literal(v_conflict)
            using errcode = 'MS007',
                hint = 'The same key must come with the same payload, key and rank; give a new message a new key.';
    end if;

    return query
    select g.ordinal::integer, coalesce(k.message_id, n.id), k.message_id is distinct from n.id and g.uuid is not null, false
    from unnest(v_uuids) with ordinality as g(uuid, ordinal)
    left join unnest(v_ordinals, v_ids) as n(ordinal, id) on n.ordinal = g.ordinal
    left join {schema}.idempotency_key_{stream_id} k on k.key = g.uuid
    order by g.ordinal;
end
$$;
revoke all on function {schema}.produce_{stream_id}(bytea[], text[], text[], boolean[], bigint[], text[], text[], jsonb[], text[], timestamptz[]) from public;
revoke all on function {schema}.produce_once_{stream_id}(bytea[], text[], bigint[], text[], text[], jsonb[], text[], timestamptz[], bigint) from public;
