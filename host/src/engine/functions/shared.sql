-- The produce API for every language, and what it stands on. Installed by `engine::functions`; replaced as a whole
-- when its checksum changes.
--
-- Who may create functions in a schema of somebody's search_path could put a better match before one of Postgres there (a
-- `format(text, integer)`, an operator) and have it run with that somebody's rights. So a function that runs in a caller's
-- session either sets its search_path, or, where that costs too much for each message, names even what is of Postgres with
-- its schema.
--
-- Errors (class MS):
--   MS001 unknown stream                      MS006 negative rank
--   MS002 a key mode without a key            MS007 idempotency conflict
--   MS003 key empty or over 1 KiB             MS009 arrays of a batch differ in length, or too many rows
--   MS004 payload over max_payload            MS010 headers or attributes out of bounds
--   MS005 impossible combination

-- Any string as a uuid: one in its usual 36 characters verbatim, anything else as a version 8 uuid (RFC 9562) of its sha256.
-- Version 5 would need SHA-1, which Postgres has only in extensions. One expression that names the hash once, not STRICT, and
-- STABLE as convert_to is, so that it is inlined into functions that set their search_path: a call costs ten times as much.
-- Bits 52 to 55 become the version, 70 and 71 the variant. A regular expression for the form of a uuid alone took 5 us.
create or replace function {schema}.idempotency_uuid(p_key text) returns uuid
language sql stable parallel safe
as $$
    select case
        when octet_length(p_key) = 36 and p_key like '________-____-____-____-____________'
            and octet_length(replace(p_key, '-', '')) = 32 and p_key !~ '[^0-9a-fA-F-]' then p_key::uuid
        else encode(set_bit(set_bit(set_bit(set_bit(set_bit(set_bit(
            substr(sha256(convert_to('millstream:' || p_key, 'UTF8')), 1, 16),
            52::bigint, 0), 53::bigint, 0), 54::bigint, 0), 55::bigint, 1), 70::bigint, 0), 71::bigint, 1), 'hex')::uuid
        end
$$;

-- The same for all of a batch, in their order.
create or replace function {schema}.idempotency_uuids(p_keys text[]) returns uuid[]
language sql stable parallel safe set search_path = pg_catalog, pg_temp
as $$
    select array_agg({schema}.idempotency_uuid(once) order by ordinal) from unnest(p_keys) with ordinality as k(once, ordinal)
$$;

-- What a repeated idempotency key must agree on. One expression, not STRICT, and STABLE as convert_to is, so that it is
-- inlined: a call costs 40 us, inlined it is 3. Most messages have neither key nor rank: for them nothing is put together.
create or replace function {schema}.message_fingerprint(p_payload bytea, p_key text, p_rank bigint) returns bytea
language sql stable parallel safe
as $$
    select sha256(
        case when p_key is null and p_rank is null and p_payload is not null then '--p'::bytea
            else convert_to(coalesce('k' || octet_length(p_key)::text || ':' || p_key, '-') || coalesce('r' || p_rank::text, '-')
                || case when p_payload is null then 't' else 'p' end, 'UTF8')
            end
        || coalesce(p_payload, ''::bytea))
$$;

create or replace function {schema}.stream_id(p_stream text) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_id integer;
begin
    select id into v_id from {schema}.stream where name = p_stream;
    if v_id is null then
        raise exception 'unknown stream %', quote_literal(left(p_stream, 200))
            using errcode = 'MS001', hint = 'Declare it as [streams.NAME] in streams.toml and run "millstream apply".';
    end if;
    return v_id;
end
$$;

-- Attaches empty partitions until at least p_ahead of them lie above the last id drawn. Returns how many it attached.
-- Never waits: another transaction that extends, or any lock on the parent, makes it return 0, and the next caller
-- tries again. So does one whose snapshot is older than the last extension (REPEATABLE READ): it would attach what is
-- there already. Attaching takes SHARE UPDATE EXCLUSIVE on the parent, which blocks neither produce nor claim.
create or replace function {schema}.extend_log(p_stream integer, p_ahead integer) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20ms'
as $$
declare
    v_parent text := 'message_log_' || p_stream;
    v_child text;
    v_rows bigint;
    v_edge bigint;
    v_last bigint;
    v_added integer := 0;
begin
    if not pg_try_advisory_xact_lock({lock_class} + 2, p_stream) then
        return 0;
    end if;
    select partition_rows into v_rows from {schema}.stream where id = p_stream;
    select coalesce(max(upper_id), 1) into v_edge from {schema}.log_partition where stream_id = p_stream;
    execute format('select last_value from {schema_format}.%I', v_parent || '_id') into v_last;
    while v_edge <= v_last + p_ahead * v_rows loop
        v_child := v_parent || '_p' || v_edge;
        execute format('create table {schema_format}.%I (like {schema_format}.%I including defaults including constraints)', v_child, v_parent);
        execute format('alter table {schema_format}.%I attach partition {schema_format}.%I for values from (%s) to (%s)',
            v_parent, v_child, v_edge, v_edge + v_rows);
        insert into {schema}.log_partition (stream_id, lower_id, upper_id, table_name)
            values (p_stream, v_edge, v_edge + v_rows, v_child);
        v_edge := v_edge + v_rows;
        v_added := v_added + 1;
    end loop;
    return v_added;
exception when lock_not_available or duplicate_table or unique_violation then
    return 0;
end
$$;
revoke all on function {schema}.extend_log(integer, integer) from public;

-- Refuses a batch with anything wrong in it, naming the item; costs a look at what is given and nothing else.
create or replace function {schema}.check_batch(
    p_max_payload_bytes bigint,
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
) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
declare
    v_count integer := cardinality(p_payloads);
    v_item bigint;
    v_bytes integer;
begin
    if v_count is null or v_count > 50000
        or v_count <> coalesce(cardinality(p_keys), v_count) or v_count <> coalesce(cardinality(p_concurrencies), v_count)
        or v_count <> coalesce(cardinality(p_compactions), v_count) or v_count <> coalesce(cardinality(p_ranks), v_count)
        or v_count <> coalesce(cardinality(p_idempotency_keys), v_count)
        or v_count <> coalesce(cardinality(p_routing_keys), v_count) or v_count <> coalesce(cardinality(p_headers), v_count)
        or v_count <> coalesce(cardinality(p_content_types), v_count)
        or v_count <> coalesce(cardinality(p_deliver_afters), v_count)
    then
        raise exception 'a batch needs arrays of one length, with at most 50000 messages'
            using errcode = 'MS009', hint = 'Give each array as many elements as p_payloads, or null; split a larger batch.';
    end if;

    -- In a target list unnest copies nothing; in FROM it copies every payload first.
    if (select max(octet_length(x)) > p_max_payload_bytes from (select unnest(p_payloads) as x) as g) then
        select o, octet_length(x) into v_item, v_bytes
        from unnest(p_payloads) with ordinality as g(x, o) where octet_length(x) > p_max_payload_bytes limit 1;
        raise exception 'payload of message % has % bytes, more than max_payload (%)', v_item, v_bytes, p_max_payload_bytes
            using errcode = 'MS004', hint = 'Store it elsewhere and send a reference, or raise max_payload of the stream.';
    end if;

    if p_keys is not null then
        select o, octet_length(x) into v_item, v_bytes
        from unnest(p_keys) with ordinality as g(x, o) where octet_length(x) not between 1 and 1024 limit 1;
        if v_item is not null then
            raise exception 'key of message % has % bytes', v_item, v_bytes
                using errcode = 'MS003', hint = 'A key has 1 to 1024 bytes; leave it out (null) for a message without one.';
        end if;
    end if;

    if p_concurrencies is not null then
        select o into v_item
        from unnest(p_concurrencies) with ordinality as g(x, o)
        where x not in ('parallel', 'exclusive', 'ordered') limit 1;
        if v_item is not null then
            raise exception 'concurrency of message % is none of parallel, exclusive, ordered', v_item
                using errcode = 'MS005', hint = 'Write it in lower case, or leave it out: the stream then decides.';
        end if;
    end if;

    if p_concurrencies is not null or p_compactions is not null then
        select o into v_item
        from unnest(p_payloads, p_keys, p_concurrencies, p_compactions) with ordinality as g(p, k, c, z, o)
        where k is null and (c <> 'parallel' or z) limit 1;
        if v_item is not null then
            raise exception 'message % asks for a key mode and has no key', v_item
                using errcode = 'MS002', hint = 'Give it a key, or leave concurrency and compaction out.';
        end if;
    end if;

    if p_ranks is not null then
        select o into v_item from unnest(p_ranks) with ordinality as g(x, o) where x < 0 limit 1;
        if v_item is not null then
            raise exception 'rank of message % is negative', v_item
                using errcode = 'MS006', hint = 'A rank is 0 or more; the highest wins.';
        end if;
        select o into v_item
        from unnest(p_payloads, p_ranks, p_keys, p_compactions) with ordinality as g(p, x, k, z, o)
        where x is not null and (k is null or not z) limit 1;
        if v_item is not null then
            raise exception 'message % has a rank and no compaction', v_item
                using errcode = 'MS005', hint = 'A rank picks the winner of a compacted key; leave it out, or ask for compaction.';
        end if;
    end if;

    if p_headers is not null then
        select o into v_item
        from unnest(p_headers) with ordinality as g(x, o)
        where x is not null and (jsonb_typeof(x) <> 'object' or pg_column_size(x) > 65536 or exists (
            select from jsonb_each(case when jsonb_typeof(x) = 'object' then x else '{}' end) as h where jsonb_typeof(h.value) <> 'string'))
        limit 1;
        if v_item is not null then
            raise exception 'headers of message % are not an object of strings of at most 64 KiB', v_item
                using errcode = 'MS010', hint = 'Give headers as {"name": "text", ...}.';
        end if;
    end if;

    select o into v_item
    from unnest(p_routing_keys, p_content_types, p_idempotency_keys) with ordinality as g(r, c, i, o)
    where octet_length(r) > 1024 or octet_length(c) > 255 or octet_length(i) not between 1 and 1024 limit 1;
    if v_item is not null then
        raise exception 'routing_key, content_type or idempotency_key of message % is out of bounds', v_item
            using errcode = 'MS010',
                hint = 'routing_key has at most 1024 bytes, content_type 255, idempotency_key 1 to 1024.';
    end if;
end
$$;

-- What holds for each message of a batch: its option, else the stream's first key rule that matches its key. Null arrays:
-- every message is parallel and not compacted.
create or replace function {schema}.key_modes(
    p_stream integer,
    p_keys text[],
    p_concurrencies text[],
    p_compactions boolean[],
    p_ranks bigint[]
) returns table (modes {schema}.concurrency[], ranks bigint[], lanes smallint[])
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_modes {schema}.concurrency[];
    v_ranks bigint[];
    v_lanes smallint[];
    v_is_plain boolean;
    v_item bigint;
begin
    if coalesce(array_remove(p_concurrencies, null), '{}') = '{}' and coalesce(array_remove(p_compactions, null), '{}') = '{}'
        and coalesce(array_remove(p_ranks, null), '{}') = '{}'
        and not exists (select from {schema}.key_rule where stream_id = p_stream)
    then
        return query select null::{schema}.concurrency[], null::bigint[], null::smallint[];
        return;
    end if;
    select array_agg(mode order by ordinal), array_agg(rank order by ordinal), array_agg(lane order by ordinal),
        bool_and(mode = 'parallel' and rank is null), min(ordinal) filter (where asked is not null and rank is null)
    into v_modes, v_ranks, v_lanes, v_is_plain, v_item
    from (
        select ordinal, asked, mode, rank,
            -- A key's versions stay in one lane. Random, so that a hot key's producers do not wait for each other either.
            case when mode <> 'parallel' and rank is null and shards > 1 then floor(random() * shards)::smallint else 0::smallint end
                as lane
        from (
            select m.ordinal, m.rank as asked, r.shards,
                case when m.key is null then 'parallel'
                    else coalesce(m.concurrency::{schema}.concurrency, r.concurrency, 'parallel') end as mode,
                case when m.key is not null and coalesce(m.compaction, r.compaction, false) then coalesce(m.rank, 0) end as rank
            from unnest(p_keys, p_concurrencies, p_compactions, p_ranks) with ordinality as m(key, concurrency, compaction, rank, ordinal)
            left join lateral (
                select * from {schema}.key_rule where stream_id = p_stream and m.key like pattern order by key_rule.ordinal limit 1
            ) as r on m.key is not null
        ) as resolved
    ) as modes;
    if v_item is not null then
        raise exception 'message % has a rank and no compaction', v_item
            using errcode = 'MS005', hint = 'A rank picks the winner of a compacted key; leave it out, or ask for compaction.';
    end if;
    if v_is_plain then
        v_modes := null;
    end if;
    return query select v_modes, case when array_remove(v_ranks, null) <> '{}' then v_ranks end, v_lanes;
end
$$;
revoke all on function {schema}.key_modes(integer, text[], text[], boolean[], bigint[]) from public;

-- Locks ordered keys (each with its lane) to the end of the transaction, so that for one key id order is commit order.
-- The lock table is shared by the whole cluster: a transaction takes at most 64 such locks. One with more keys takes the
-- stream's ordered lock for itself, which the others share. It waits for that one in short turns: whoever waits longer
-- would, behind one producer that keeps its transaction open, stop all the others. Every tenth second it waits long
-- enough for Postgres to find a deadlock; and one that shares the lock already waits plainly, since two of those are one.
create or replace function {schema}.lock_ordered_keys(p_stream integer, p_keys text[]) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_locks bigint[];
    v_lock bigint;
    v_held integer := coalesce(nullif(current_setting('millstream.key_locks', true), ''), '0')::integer;
    v_since timestamptz := clock_timestamp();
    v_patience interval := current_setting('lock_timeout')::interval;
    v_try integer := 0;
begin
    select array_agg(distinct hashtextextended(k, {lock_class}::bigint << 32 | p_stream)) into v_locks from unnest(p_keys) as k;
    if v_locks is null then
        return;
    end if;
    if v_held > 0 and v_held + cardinality(v_locks) > 64 then
        select count(*) into v_held from pg_locks    -- calls for the same keys take no more of them
        where locktype = 'advisory' and objsubid = 1 and pid = pg_backend_pid()
            and not (classid::bigint << 32 | objid::bigint) = any (v_locks);
    end if;
    perform set_config('millstream.key_locks', (v_held + cardinality(v_locks))::text, true);
    if v_held + cardinality(v_locks) <= 64 then
        perform pg_advisory_xact_lock_shared({lock_class} + 5, p_stream);
        foreach v_lock in array v_locks loop    -- sorted by `distinct`
            perform pg_advisory_xact_lock(v_lock);
        end loop;
        return;
    end if;
    if v_held > 0 then
        perform pg_advisory_xact_lock({lock_class} + 5, p_stream);
        return;
    end if;
    loop
        v_try := v_try + 1;
        begin
            perform set_config('lock_timeout', case when v_try % 80 = 0
                then extract(epoch from current_setting('deadlock_timeout')::interval) * 1000 + 200 else 20 end || 'ms', true);
            perform pg_advisory_xact_lock({lock_class} + 5, p_stream);
            perform set_config('lock_timeout', extract(epoch from v_patience) * 1000 || 'ms', true);
            return;
        exception when lock_not_available then
            if v_patience > interval '0' and clock_timestamp() - v_since >= v_patience then
                raise;
            end if;
        end;
        perform pg_sleep(0.1);
    end loop;
end
$$;
revoke all on function {schema}.lock_ordered_keys(integer, text[]) from public;

-- Produces a batch in the caller's transaction, in array order. Arrays may be null (nothing given), else as long as
-- p_payloads. One row per message, in order; a duplicate answers the first id.
create or replace function {schema}.produce_batch(
    p_stream text,
    p_payloads bytea[],
    p_keys text[] default null,
    p_concurrencies text[] default null,
    p_compactions boolean[] default null,
    p_ranks bigint[] default null,
    p_idempotency_keys text[] default null,
    p_routing_keys text[] default null,
    p_headers jsonb[] default null,
    p_content_types text[] default null,
    p_deliver_afters timestamptz[] default null
) returns table (ordinal integer, id bigint, duplicate boolean, superseded boolean)
language plpgsql
as $$
begin
    return query execute pg_catalog.format('select * from {schema_format}.produce_%s($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)',
        {schema}.stream_id(p_stream))
    using p_payloads, p_keys, p_concurrencies, p_compactions, p_ranks, p_idempotency_keys, p_routing_keys, p_headers,
        p_content_types, p_deliver_afters;
end
$$;

-- Produces one message in the caller's transaction. The payload may be bytea, text or jsonb; null is a tombstone.
create or replace function {schema}.produce(
    stream text,
    payload bytea,
    key text default null,
    concurrency text default null,
    compaction boolean default null,
    rank bigint default null,
    idempotency_key text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default null,
    deliver_after timestamptz default null
) returns table (id bigint, duplicate boolean, superseded boolean)
language sql
as $$
    select b.id, b.duplicate, b.superseded
    from {schema}.produce_batch(stream, array[payload], array[key], array[concurrency], array[compaction], array[rank],
        array[idempotency_key], array[routing_key], array[headers], array[content_type], array[deliver_after]) as b
$$;

create or replace function {schema}.produce(
    stream text,
    payload text,
    key text default null,
    concurrency text default null,
    compaction boolean default null,
    rank bigint default null,
    idempotency_key text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default null,
    deliver_after timestamptz default null
) returns table (id bigint, duplicate boolean, superseded boolean)
language sql
as $$
    select * from {schema}.produce(stream, pg_catalog.convert_to(payload, 'UTF8'), key, concurrency, compaction, rank,
        idempotency_key, routing_key, headers, content_type, deliver_after)
$$;

create or replace function {schema}.produce(
    stream text,
    payload jsonb,
    key text default null,
    concurrency text default null,
    compaction boolean default null,
    rank bigint default null,
    idempotency_key text default null,
    routing_key text default null,
    headers jsonb default null,
    content_type text default 'application/json',
    deliver_after timestamptz default null
) returns table (id bigint, duplicate boolean, superseded boolean)
language sql
as $$
    select * from {schema}.produce(stream, pg_catalog.convert_to(payload::text, 'UTF8'), key, concurrency, compaction, rank,
        idempotency_key, routing_key, headers, content_type, deliver_after)
$$;

-- Lets a role produce to one stream, and nothing else.
create or replace function {schema}.grant_produce(p_role text, p_stream text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('grant usage on schema {schema_format} to %I', p_role);
    execute format('grant execute on function {schema_format}.%I(bytea[], text[], text[], boolean[], bigint[], text[], text[], jsonb[], text[], timestamptz[]) to %I',
        'produce_' || {schema}.stream_id(p_stream), p_role);
end
$$;

-- Which of these groups have something to do: one query for all idle groups of a host.
-- Cheap first: something due, a sequence beyond the cursor, or an open gap, all in one statement. The last two need a
-- look at the log, one index probe each: ids at the tail may have been rolled back, and a gap is work only once
-- something has appeared in it or none of its producers is left. Else every group would turn at the shortest interval
-- for as long as one producer sleeps in its transaction.
create or replace function {schema}.groups_with_work(p_groups integer[]) returns setof integer
language plpgsql set search_path = pg_catalog, pg_temp set jit = off
as $$
declare
    v_group record;
    v_work boolean;
begin
    for v_group in
        select g.id, g.stream_id, c.claimed, c.gap_floor, w.*
        from {schema}.consumer_group g
        cross join lateral (
            select claimed, gap_floor from {schema}.cursor where group_id = g.id order by claimed desc limit 1
        ) as c
        cross join lateral (
            select exists (select from {schema}.cursor_gap where group_id = g.id and id >= c.gap_floor) as gap,
                exists (select from {schema}.exception
                    where group_id = g.id and state in ('waiting', 'delayed') and due_at <= clock_timestamp())
                or exists (                     -- a key that is ready, or one that rests with something to bury
                    select from {schema}.message_key_lease l
                    where group_id = g.id and host_id is null and blocked_by is null and paused_at is null and (not rests or buries))
                    as due,
                pg_sequence_last_value(format('{schema_format}.message_log_%s_id', g.stream_id)::regclass) > c.claimed as drawn
        ) as w
        where g.id = any (p_groups) and g.paused_at is null and (w.due or w.gap or w.drawn)
    loop
        v_work := v_group.due;
        if not v_work and v_group.drawn then
            execute format('select {schema_format}.%I($1)', 'has_work_' || v_group.stream_id) into v_work using v_group.claimed;
        end if;
        if not v_work and v_group.gap then
            execute format('select {schema_format}.%I($1, $2)', 'has_late_' || v_group.stream_id)
                into v_work using v_group.id, v_group.gap_floor;
        end if;
        if v_work then
            return next v_group.id;
        end if;
    end loop;
end
$$;
