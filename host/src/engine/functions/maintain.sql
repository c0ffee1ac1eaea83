-- Maintenance: what it asks before it does anything, each one cheap query for all streams, and what it does. Installed by
-- `engine::functions`; called by `engine::maintain`.

-- Streams whose log has fewer than p_ahead empty partitions ahead of the last id drawn.
create or replace function {schema}.streams_to_extend(p_ahead integer) returns setof integer
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select s.id from {schema}.stream s
    where coalesce((select max(upper_id) from {schema}.log_partition where stream_id = s.id), 1)
        <= coalesce(pg_sequence_last_value(format('{schema_format}.message_log_%s_id', s.id)::regclass), 1) + p_ahead * s.partition_rows
$$;

-- Streams with idempotency keys older than their idempotency_ttl. Index: idempotency_key_N_age.
create or replace function {schema}.streams_with_old_idempotency_keys() returns setof integer
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream record;
    v_found boolean;
begin
    for v_stream in select id, idempotency_ttl_ms from {schema}.stream order by id loop
        execute format('select exists (select from {schema_format}.%I where created_at < clock_timestamp() - $1 * interval ''1 ms'')',
            'idempotency_key_' || v_stream.id) into v_found using v_stream.idempotency_ttl_ms;
        if v_found then
            return next v_stream.id;
        end if;
    end loop;
end
$$;

-- Detaches that began and did not end: their process, its host or the database crashed, or the wait for older
-- transactions took too long.
create or replace function {schema}.half_detached_partitions() returns table (stream_id integer, lower_id bigint)
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select p.stream_id, p.lower_id
    from {schema}.log_partition p
    join pg_inherits i on i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)) and i.inhdetachpending
    order by p.stream_id, p.lower_id
$$;

-- Partitions that are out of the log and whose tables wait to be dropped.
create or replace function {schema}.detached_partitions() returns table (stream_id integer, lower_id bigint)
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select p.stream_id, p.lower_id
    from {schema}.log_partition p
    where p.detached_at is not null
        or not exists (select from pg_inherits i where i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)))
    order by p.stream_id, p.lower_id
$$;

-- Ends a detach that began. Waits for transactions that may still read the partition, at most for the caller's
-- lock_timeout.
create or replace function {schema}.finish_detach(p_stream integer, p_lower_id bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_table text;
begin
    select table_name into strict v_table from {schema}.log_partition where stream_id = p_stream and lower_id = p_lower_id;
    execute format('alter table {schema_format}.%I detach partition {schema_format}.%I finalize', 'message_log_' || p_stream, v_table);
    perform {schema}.note_detached(p_stream, p_lower_id);
end
$$;

-- Notes that a partition has left the log, if it has.
create or replace function {schema}.note_detached(p_stream integer, p_lower_id bigint) returns void
language sql set search_path = pg_catalog, pg_temp
as $$
    update {schema}.log_partition p set detached_at = clock_timestamp()
    where p.stream_id = p_stream and p.lower_id = p_lower_id and p.detached_at is null
        and not exists (select from pg_inherits i where i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)))
$$;

-- Drops a partition that has left the log, and forgets it in the same transaction. Twice changes nothing.
create or replace function {schema}.drop_detached(p_stream integer, p_lower_id bigint) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_table text;
begin
    select table_name into v_table from {schema}.log_partition p
    where stream_id = p_stream and lower_id = p_lower_id and detached_at is not null
        and not exists (select from pg_inherits i where i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)))
    for update;
    if v_table is not null then
        execute format('drop table if exists {schema_format}.%I', v_table);
        delete from {schema}.log_partition where stream_id = p_stream and lower_id = p_lower_id;
    end if;
end
$$;

-- The lowest id of a stream that some group may still have to deliver, and that group; no row for a stream without groups.
-- One statement, so that a message on its way from a claim to an exception is seen in one of them. Dead letters and what
-- was redriven from them have their own copy and hold nothing.
create or replace function {schema}.stream_progress(p_stream integer) returns table (message_id bigint, group_name text)
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select least(
            c.claimed + 1,
            (select min(lower(missing)) from {schema}.cursor_gap where group_id = g.id),
            (select min(lower(pending)) from {schema}.claim where group_id = g.id and id > 0),
            (select min(e.message_id) from {schema}.exception e where e.group_id = g.id and e.dead_letter_id is null)),
        g.name
    from {schema}.consumer_group g join {schema}.cursor c on c.group_id = g.id
    where g.stream_id = p_stream
    order by 1 limit 1
$$;

-- Streams that have versions to thin: compacted, with a retention, and more than one partition drawn from.
create or replace function {schema}.streams_to_thin() returns setof integer
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_stream record;
    v_found boolean;
begin
    for v_stream in select id, partition_rows from {schema}.stream where retention_ms is not null order by id loop
        execute format('select exists (select from {schema_format}.%I)', 'compaction_head_' || v_stream.id) into v_found;
        if v_found then
            return next v_stream.id;
        end if;
    end loop;
end
$$;

-- Thins one partition of a compacted stream, in place: of what is older than the retention and behind every group, only
-- the newest version of each key stays, and a tombstone until tombstone_retention after everybody had it and until no
-- other version of its key is left; its rank is forgotten with it. A tombstone whose key somebody produces to just now
-- stays as well: nobody is waited for. A version whose winner is not in the log stays, it may be all that is left of its key.
-- Deletes p_limit rows at most, and answers how many; 0 when there is nothing to do in any partition, and less when there
-- are so many versions without a winner, which there never must be. A partition without versions is left to be dropped
-- whole. A crash at any point changes no key's winner.
create or replace function {schema}.thin_log(p_stream integer, p_limit integer) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_stream {schema}.stream;
    v_part record;
    v_needed bigint;
    v_last bigint;
    v_newest timestamptz;
    v_found boolean;
    v_over bigint[];                            -- tombstones that may go: their heads are locked
    v_rows bigint;
    v_damaged bigint := 0;
begin
    select * into v_stream from {schema}.stream where id = p_stream;
    v_last := coalesce(pg_sequence_last_value(format('{schema_format}.message_log_%s_id', p_stream)::regclass), 0);
    select message_id into v_needed from {schema}.stream_progress(p_stream);
    for v_part in
        select p.lower_id, p.table_name, p.passed_at, i.inhrelid
        from {schema}.log_partition p
        join pg_inherits i on i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)) and not i.inhdetachpending
        where p.stream_id = p_stream and p.detached_at is null and p.upper_id <= least(v_last, coalesce(v_needed, v_last))
            and (p.thinned_at is null or p.thinned_at < clock_timestamp() - interval '10 minutes')
        order by p.lower_id
    loop
        execute format('select created_at from {schema_format}.%I order by id desc limit 1', v_part.table_name) into v_newest;
        exit when v_newest >= clock_timestamp() - v_stream.retention_ms * interval '1 ms';
        exit when exists (select from pg_locks where locktype = 'relation' and relation = v_part.inhrelid
            and mode = 'RowExclusiveLock' and database = (select oid from pg_database where datname = current_database()));
        execute format('select exists (select from {schema_format}.%I where compaction_rank is not null)', v_part.table_name) into v_found;
        continue when not v_found;
        if v_part.passed_at is null then
            update {schema}.log_partition set passed_at = clock_timestamp() where stream_id = p_stream and lower_id = v_part.lower_id
            returning passed_at into v_part.passed_at;
        end if;
        v_over := '{}';
        if v_part.passed_at < clock_timestamp() - v_stream.tombstone_retention_ms * interval '1 ms' then
            execute format($sql$
                select coalesce(array_agg(id), '{}') from (
                    select l.id
                    from {schema_format}.%1$I l
                    join {schema_format}.%2$I h on h.message_key = l.message_key and h.message_id = l.id
                    where l.compaction_rank is not null and l.payload is null and (
                        select true from {schema_format}.%3$I v
                        where v.message_key = l.message_key and v.compaction_rank is not null and v.id <> l.id limit 1) is null
                    order by l.id limit $1 for update of h skip locked
                ) as over
                $sql$, v_part.table_name, 'compaction_head_' || p_stream, 'message_log_' || p_stream)
            into v_over using p_limit;
        end if;
        -- Other versions once more, under the locks: a producer may have lost to the tombstone a moment ago.
        execute format($sql$
            with old as materialized (
                select l.id, case when h.message_id = l.id then l.message_key end as forgotten_key
                from {schema_format}.%1$I l
                left join {schema_format}.%2$I h on l.compaction_rank is not null and h.message_key = l.message_key
                where case
                    when l.compaction_rank is null then true
                    when h.message_id = l.id then l.id = any ($2) and (
                        select true from {schema_format}.%3$I v
                        where v.message_key = l.message_key and v.compaction_rank is not null and v.id <> l.id limit 1) is null
                    else (select true from {schema_format}.%3$I w where w.id = h.message_id) end
                order by l.id limit $1 for update of l skip locked
            ),
            forgotten as (
                delete from {schema_format}.%2$I h using old o where h.message_key = o.forgotten_key and h.message_id = o.id
            )
            delete from {schema_format}.%1$I l using old o where l.id = o.id
            $sql$, v_part.table_name, 'compaction_head_' || p_stream, 'message_log_' || p_stream)
        using p_limit, v_over;
        get diagnostics v_rows = row_count;
        if v_rows > 0 then
            return v_rows;
        end if;
        execute format($sql$
            select count(*)
            from {schema_format}.%1$I l left join {schema_format}.%2$I h on h.message_key = l.message_key
            where l.compaction_rank is not null and h.message_id is distinct from l.id
                and (select true from {schema_format}.%3$I w where w.id = h.message_id) is null
            $sql$, v_part.table_name, 'compaction_head_' || p_stream, 'message_log_' || p_stream)
        into v_rows;
        v_damaged := v_damaged + v_rows;
        update {schema}.log_partition set thinned_at = clock_timestamp()
        where stream_id = p_stream and lower_id = v_part.lower_id and v_rows = 0;
    end loop;
    return -v_damaged;
end
$$;

-- Partitions older than their stream's retention, lowest first, up to the first that is not, p_limit for a stream at most;
-- those that hold versions of keys are thinned in place, and listed only where a group keeps them from it that has never
-- been past them.
-- `pinned_by` is the group that still needs one, and null when it can go by the statement `detach`, which no transaction
-- and no function may surround.
--
-- A partition is old when all its ids have been drawn, no open transaction has written to it, and its newest row is
-- older than the retention; when it is empty (all rolled back), the partition itself must be. Its newest row is the one
-- with the highest id, an index probe: an id is drawn by the statement that stores the row, so time follows ids but for
-- the length of one statement.
create or replace function {schema}.old_partitions(p_limit integer)
returns table (stream_id integer, stream_name text, lower_id bigint, detach text, pinned_by text)
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_stream record;
    v_part record;
    v_needed record;
    v_last bigint;
    v_newest timestamptz;
    v_found boolean;
    v_count integer;
begin
    for v_stream in select id, name, retention_ms from {schema}.stream where retention_ms is not null order by id loop
        v_last := coalesce(pg_sequence_last_value(format('{schema_format}.message_log_%s_id', v_stream.id)::regclass), 0);
        v_needed := null;
        v_count := 0;
        for v_part in
            select p.lower_id, p.upper_id, p.table_name, p.created_at, p.passed_at, i.inhrelid
            from {schema}.log_partition p
            join pg_inherits i on i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)) and not i.inhdetachpending
            where p.stream_id = v_stream.id and p.upper_id <= v_last and p.detached_at is null
            order by p.lower_id
        loop
            execute format('select created_at from {schema_format}.%I order by id desc limit 1', v_part.table_name) into v_newest;
            exit when coalesce(v_newest, v_part.created_at) >= clock_timestamp() - v_stream.retention_ms * interval '1 ms';
            exit when exists (select from pg_locks where locktype = 'relation' and relation = v_part.inhrelid
                and mode = 'RowExclusiveLock' and database = (select oid from pg_database where datname = current_database()));
            execute format('select exists (select from {schema_format}.%I where compaction_rank is not null)', v_part.table_name)
                into v_found;
            continue when v_found and v_part.passed_at is not null;
            if v_needed is null then
                select * into v_needed from {schema}.stream_progress(v_stream.id);
            end if;
            continue when v_found and (v_needed.message_id < v_part.upper_id) is not true;
            v_count := v_count + 1;
            exit when v_count > p_limit;
            stream_id := v_stream.id;
            stream_name := v_stream.name;
            lower_id := v_part.lower_id;
            detach := format('alter table {schema_format}.%I detach partition {schema_format}.%I concurrently',
                'message_log_' || v_stream.id, v_part.table_name);
            pinned_by := case when v_needed.message_id < v_part.upper_id then v_needed.group_name end;
            return next;
        end loop;
    end loop;
end
$$;

-- Groups whose first undelivered message is older than their stream's max_lag.
create or replace function {schema}.lagging_groups() returns setof integer
language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_group record;
    v_lags boolean;
begin
    for v_group in
        select g.id, g.stream_id, c.claimed, s.max_lag_ms
        from {schema}.stream s join {schema}.consumer_group g on g.stream_id = s.id join {schema}.cursor c on c.group_id = g.id
        where s.max_lag_ms is not null
            and pg_sequence_last_value(format('{schema_format}.message_log_%s_id', s.id)::regclass) > c.claimed
        order by g.id
    loop
        execute format('select exists (select from {schema_format}.%I($1, 1) where created_at < clock_timestamp() - $2 * interval ''1 ms'')',
            'log_heads_' || v_group.stream_id) into v_lags using v_group.claimed, v_group.max_lag_ms;
        if v_lags then
            return next v_group.id;
        end if;
    end loop;
end
$$;

-- Moves a lagging group's cursor to just before the first message younger than max_lag, and tells from where to where;
-- no row when its claims are busy or it does not lag any more. Claims, gaps and exceptions it has stay.
--
-- Time follows ids, so the place is found by halving: some 40 index probes, however far the group lags. What is not yet
-- committed among the ids passed over is as old as its neighbours, and passed with them.
create or replace function {schema}.pass_lagging(p_group integer) returns table (group_name text, from_id bigint, to_id bigint)
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_group record;
    v_below bigint;                             -- the first message after it is too old
    v_above bigint;                             -- the first message after it is young, or there is none
    v_middle bigint;
    v_old_id bigint;
begin
    if not pg_try_advisory_xact_lock({lock_class} + 1, p_group) then
        return;
    end if;
    select g.name, g.stream_id, c.claimed, clock_timestamp() - s.max_lag_ms * interval '1 ms' as oldest,
        pg_sequence_last_value(format('{schema_format}.message_log_%s_id', s.id)::regclass) as last
    into v_group
    from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id join {schema}.cursor c on c.group_id = g.id
    where g.id = p_group;
    v_below := v_group.claimed;
    v_above := greatest(v_group.last, v_group.claimed);
    while v_below < v_above loop
        v_middle := v_below + (v_above - v_below) / 2;
        execute format('select id from {schema_format}.%I($1, 1) where created_at < $2', 'log_heads_' || v_group.stream_id)
            into v_old_id using v_middle, v_group.oldest;
        if v_old_id is null then
            v_above := v_middle;
        else
            v_below := v_old_id;                -- that message is passed
        end if;
    end loop;
    if v_below > v_group.claimed then
        update {schema}.cursor set claimed = v_below, begins_after = v_below where group_id = p_group;
        return query select v_group.name, v_group.claimed, v_below;
    end if;
end
$$;

-- Makes keys ready that have deferred messages and no lease row, and has those that rest buried. Answers how many needed
-- it: a turn may have been quicker.
-- Index: exception_deferred.
create or replace function {schema}.ready_keys(p_group integer, p_keys text[], p_lanes smallint[]) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_keys bigint;
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    insert into {schema}.message_key_lease as l (group_id, message_key, lane)
    select p_group, k.message_key, k.lane
    from unnest(p_keys, p_lanes) as k (message_key, lane)
    where exists (
        select from {schema}.exception e
        where e.group_id = p_group and e.message_key = k.message_key and e.lane = k.lane and e.state = 'deferred')
    on conflict (group_id, message_key, lane) do update set buries = true where l.rests and not l.buries;
    get diagnostics v_keys = row_count;
    return v_keys;
end
$$;

-- Lets keys go whose host does not exist, p_max at most; answers how many. No turn can take one for that host meanwhile: it
-- would need the host's row. Index: message_key_lease_host.
create or replace function {schema}.free_leases(p_group integer, p_host bigint, p_max bigint) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_keys text[];
    v_lanes smallint[];
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    select array_agg(message_key), array_agg(lane) into v_keys, v_lanes
    from (
        select message_key, lane from {schema}.message_key_lease
        where host_id = p_host and group_id = p_group and not exists (select from {schema}.host where id = p_host)
        limit p_max
    ) as l;
    if v_keys is null then
        return 0;
    end if;
    perform {schema}.release_keys(p_group, p_host, v_keys, v_lanes);
    return cardinality(v_keys);
end
$$;
