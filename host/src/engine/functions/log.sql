-- Reading the log of one stream, whatever the number of its partitions. Installed by `engine::functions` for every stream;
-- turns, settles, recovery and maintenance find their rows through these functions. Only a turn on its short way names a
-- partition itself, the one that log_partition_N has told it.
--
-- A plan over the whole log opens and locks each of its partitions: with 300 of them a turn took 30 to 80 ms instead of 1.
-- So each query here is planned for its values and names the bounds of one partition, and touches that one alone.
-- The functions are STABLE: all that one statement reads through them is of that statement's snapshot.

-- The first rows after a position, in id order, at most p_want, without payloads: what a claim decides by. A payload is
-- copied at each step of a plan, so it is read last. Index: message_log primary key.
create or replace function {schema}.log_heads_{stream_id}(p_after bigint, p_want integer)
returns table (id bigint, created_at timestamptz, deliver_after timestamptz, message_key text, routing_key text, headers jsonb,
    payload_bytes integer, concurrency {schema}.concurrency, compaction_rank bigint, lane smallint)
language plpgsql stable rows 250 set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    v_part record;
    v_last bigint;
    v_left integer := p_want;
    v_rows integer;
begin
    select last_value into v_last from {schema}.message_log_{stream_id}_id;
    for v_part in
        select lower_id, upper_id from {schema}.log_partition
        where stream_id = {stream_id} and lower_id <= v_last and lower_id >= coalesce(
            (select max(lower_id) from {schema}.log_partition where stream_id = {stream_id} and lower_id <= p_after + 1), 0)
        order by lower_id
    loop
        return query
        select id, created_at, deliver_after, message_key, routing_key, headers, coalesce(octet_length(payload), 0),
            concurrency, compaction_rank, lane
        from {schema}.message_log_{stream_id}
        where id > p_after and id >= v_part.lower_id and id < v_part.upper_id order by id limit v_left;
        get diagnostics v_rows = row_count;
        v_left := v_left - v_rows;
        exit when v_left <= 0;
    end loop;
end
$$;

-- The partition that an id belongs to. Null: it is not there yet, or is leaving the log, whoever detaches it.
create or replace function {schema}.log_partition_{stream_id}(p_id bigint) returns text
language sql stable
as $$
    select p.table_name from {schema}.log_partition p
    where p.stream_id = {stream_id} and p.lower_id <= p_id and p.upper_id > p_id and exists (
        select from pg_inherits
        where inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)) and not inhdetachpending)
$$;

-- How far the log goes on after a position without a hole, at most p_want messages, in one of its partitions: what most
-- turns look for. `is_plain`: no key matters there; `is_due`: and no time. Null: nothing is visible there, or a hole comes
-- first. Index: message_log primary key.
create or replace function {schema}.log_prefix_{stream_id}(
    p_partition text, p_after bigint, p_want integer, p_override {schema}.concurrency
) returns table (upto bigint, bytes bigint, is_plain boolean, is_due boolean)
language plpgsql stable rows 1
as $$
declare
    v_upto bigint := p_after + p_want;
    v_rows bigint;
begin
    for try in 1..2 loop
        execute format(
            'select max(id), count(*), coalesce(sum(octet_length(payload)), 0), bool_and(deliver_after is null), bool_and(
                (concurrency = ''parallel'' or $3 is not distinct from ''parallel'') and compaction_rank is null)
            from {schema_format}.%I where id > $1 and id <= $2', p_partition)
        into upto, v_rows, bytes, is_due, is_plain using p_after, v_upto, p_override;
        if v_rows = upto - p_after then         -- no hole
            return next;
            return;
        end if;
        exit when upto is null;
        execute format('select max(id) from (select id, row_number() over (order by id) as n from {schema_format}.%I
            where id > $1 and id <= $2) as m where id = $1 + n', p_partition)
        into v_upto using p_after, upto;
        exit when v_upto is null;
    end loop;
end
$$;

-- What keys matter of the messages after one position up to another, in one partition: `plain` for those without, and one
-- element of each of the others. `mode` as the group treats it. Index: message_log primary key.
create or replace function {schema}.log_keys_{stream_id}(
    p_partition text, p_after bigint, p_upto bigint, p_override {schema}.concurrency
) returns table (plain bigint[], ids bigint[], keys text[], lanes smallint[], modes {schema}.concurrency[], compacted boolean[])
language plpgsql stable rows 1
as $$
begin
    return query execute format(
        'select array_agg(id) filter (where is_plain), array_agg(id) filter (where not is_plain),
            array_agg(message_key) filter (where not is_plain), array_agg(lane) filter (where not is_plain),
            array_agg(mode) filter (where not is_plain), array_agg(compacted) filter (where not is_plain)
        from (
            select *, mode = ''parallel'' and not compacted as is_plain
            from (
                select id, message_key, lane, least(concurrency, $3) as mode, compaction_rank is not null as compacted
                from {schema_format}.%I where id > $1 and id <= $2 order by id
            ) as m
        ) as m', p_partition)
    using p_after, p_upto, p_override;
end
$$;

-- All rows after one position up to another. Index: message_log primary key.
create or replace function {schema}.log_between_{stream_id}(p_after bigint, p_upto bigint)
returns setof {schema}.message_log_{stream_id}
language plpgsql stable rows 250 set plan_cache_mode = force_custom_plan
as $$
declare
    v_part record;
begin
    if p_upto <= p_after then
        return;
    end if;
    for v_part in
        select lower_id, upper_id from {schema}.log_partition
        where stream_id = {stream_id} and lower_id <= p_upto and upper_id > p_after + 1
        order by lower_id
    loop
        return query select * from {schema}.message_log_{stream_id}
            where id > p_after and id <= p_upto and id >= v_part.lower_id and id < v_part.upper_id order by id;
    end loop;
end
$$;

-- What has appeared in the open gaps of a group: p_want rows and one more, which tells that something is left, of each
-- range too. Lowest partition first. Index: message_log primary key.
create or replace function {schema}.log_in_gaps_{stream_id}(p_group integer, p_gap_floor bigint, p_want integer)
returns table (gap_id bigint, message {schema}.message_log_{stream_id})
language plpgsql stable rows 250 set plan_cache_mode = force_custom_plan
as $$
declare
    v_part record;
    v_left integer := p_want + 1;
    v_rows integer;
begin
    for v_part in
        select p.lower_id, p.upper_id, array_agg(g.id) as gaps
        from (select id, missing from {schema}.cursor_gap where group_id = p_group and id >= p_gap_floor order by id limit 1000) as g
        join {schema}.log_partition p on p.stream_id = {stream_id} and g.missing && int8range(p.lower_id, p.upper_id)
        group by p.lower_id, p.upper_id order by p.lower_id
    loop
        return query
        select g.id, l.message
        from {schema}.cursor_gap g, unnest(g.missing) as r (ids), lateral (
            select m as message from {schema}.message_log_{stream_id} m
            where m.id >= v_part.lower_id and m.id < v_part.upper_id and m.id >= lower(r.ids) and m.id < upper(r.ids)
            order by m.id limit p_want + 1
        ) as l
        where g.id = any (v_part.gaps) and r.ids && int8range(v_part.lower_id, v_part.upper_id)
        limit v_left;
        get diagnostics v_rows = row_count;
        v_left := v_left - v_rows;
        exit when v_left <= 0;
    end loop;
end
$$;

-- The rows with these ids. Index: message_log primary key.
create or replace function {schema}.log_rows_{stream_id}(p_ids bigint[]) returns setof {schema}.message_log_{stream_id}
language plpgsql stable rows 10 set plan_cache_mode = force_custom_plan
as $$
begin
    return query select * from {schema}.message_log_{stream_id} where id = any (p_ids);
end
$$;

-- Is there anything in the log after the cursor? Called by groups_with_work.
create or replace function {schema}.has_work_{stream_id}(p_claimed bigint) returns boolean
language sql stable
as $$
    select exists (select from {schema}.log_heads_{stream_id}(p_claimed, 1))
$$;
