-- Positions of one stream's log: where a group begins, or is sent. Installed by `engine::functions` for every stream;
-- called by the statements `start_*.sql` and `seek_*.sql`, and by `why.sql`.

-- The position before everything that retention has left. No message at or below it can be delivered any more.
create or replace function {schema}.log_floor_{stream_id}() returns bigint
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select coalesce(min(p.lower_id), 1) - 1
    from {schema}.log_partition p
    join pg_inherits i on i.inhrelid = to_regclass(format('{schema_format}.%I', p.table_name)) and not i.inhdetachpending
    where p.stream_id = {stream_id} and p.detached_at is null
$$;

-- The visible message before the first one that was produced at or after a time, or the last one when there is none; the
-- floor when nothing stands before it.
--
-- Ids and times rise together, but for the length of one statement: an id is drawn by the statement that stores the row.
-- So a search by halves, one index probe each, goes to the last message older than the time by a minute, far longer than
-- any batch takes; from there every row is looked at, in order, until one is young enough.
-- A clock that was set back by more than that makes a time stand at several places; one of them is found.
create or replace function {schema}.position_of_time_{stream_id}(p_time timestamptz) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp set jit = off
as $$
#variable_conflict use_column
declare
    v_below bigint := {schema}.log_floor_{stream_id}();     -- everything visible up to here is too old
    v_above bigint;                                         -- what comes after it is young, or not there
    v_middle bigint;
    v_old bigint;
    v_first bigint;
    v_last bigint;
begin
    select greatest(last_value, v_below) into v_above from {schema}.message_log_{stream_id}_id;
    while v_below < v_above loop
        v_middle := v_below + (v_above - v_below) / 2;
        select id into v_old from {schema}.log_heads_{stream_id}(v_middle, 1) where created_at < p_time - interval '1 minute';
        if v_old is null then
            v_above := v_middle;
        else
            v_below := v_old;
        end if;
    end loop;
    loop
        select min(id) filter (where created_at >= p_time), max(id) into v_first, v_last
        from {schema}.log_heads_{stream_id}(v_below, 5000);
        exit when v_first is not null or v_last is null;
        v_below := v_last;
    end loop;
    return coalesce((select max(id) from {schema}.log_heads_{stream_id}(v_below, 5000) where id < v_first), v_below);
end
$$;
