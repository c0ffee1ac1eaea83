-- What an operator does to one key of a group, each in a transaction of its own under the group's advisory lock, so that it
-- meets no turn. With `shards`, all lanes of the key are meant. Installed by `engine::functions`; called by `engine::keys`
-- and `engine::seek_key`.

-- The lanes that a key has for a group, those of older rules of its stream among them.
create or replace function {schema}.key_lanes(p_group integer, p_key text) returns setof smallint
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select lane::smallint
    from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id
    cross join generate_series(0, greatest(s.past_shards, (
        select r.shards from {schema}.key_rule r where r.stream_id = s.id and p_key like r.pattern order by r.ordinal limit 1)) - 1) as lane
    where g.id = p_group
$$;

-- The first thing that each of them does. A settle may have the key locked, and whoever waits for that with the group's lock
-- holds up the whole group: it fails at once with 55P03 instead, and is to be tried again.
create or replace function {schema}.lock_key(p_group integer, p_key text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    perform from {schema}.message_key_lease where group_id = p_group and message_key = p_key for update nowait;
end
$$;

-- Ends the rest of a key: what is deferred behind it runs, what was redriven in its place. Answers how many lanes rested.
create or replace function {schema}.release_key(p_group integer, p_key text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_lanes bigint;
begin
    perform {schema}.lock_key(p_group, p_key);
    update {schema}.message_key_lease set rests = false, buries = false, changed_at = clock_timestamp()
    where group_id = p_group and message_key = p_key and rests;
    get diagnostics v_lanes = row_count;
    return v_lanes;
end
$$;

-- Lets a key go on without the message it waits for, and answers which those were. One that waited for a retry or for its
-- time is taken out: the caller buries it in the same transaction. A dead letter stays one.
create or replace function {schema}.skip_key(p_group integer, p_key text)
returns table (message_id bigint, failures integer, digest text, concurrency text, lane smallint, dead_letter_id bigint, is_dead boolean)
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform {schema}.lock_key(p_group, p_key);
    return query
    with head as materialized (
        select blocked_by, lane from {schema}.message_key_lease
        where group_id = p_group and message_key = p_key and blocked_by is not null
    ),
    gone as (
        delete from {schema}.exception e using head h where e.group_id = p_group and e.message_id = h.blocked_by
        returning e.message_id, e.failures, e.last_digest, e.concurrency, e.dead_letter_id
    ),
    ready as (
        update {schema}.message_key_lease l set blocked_by = null, changed_at = clock_timestamp()
        from head h where l.group_id = p_group and l.message_key = p_key and l.lane = h.lane
    )
    select h.blocked_by, coalesce(g.failures, 0), g.last_digest, coalesce(g.concurrency, 'ordered')::text, h.lane, g.dead_letter_id,
        g.message_id is null
    from head h left join gone g on g.message_id = h.blocked_by;
end
$$;

-- Holds a key, or lets it go on: a host that has it runs what it took, and nothing more of it is taken until then. Answers
-- how many lanes that changed; one that a seek holds is the operator's then, and stays held after it. A key held without a
-- mode has no effect: its messages do not ask.
create or replace function {schema}.pause_key(p_group integer, p_key text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_lanes bigint;
begin
    perform {schema}.lock_key(p_group, p_key);
    insert into {schema}.message_key_lease as l (group_id, message_key, lane, paused_at)
    select p_group, p_key, lane, clock_timestamp() from {schema}.key_lanes(p_group, p_key) as lane
    on conflict (group_id, message_key, lane) do update
        set paused_at = coalesce(l.paused_at, excluded.paused_at), seek_began = null, changed_at = excluded.paused_at
        where l.paused_at is null or l.seek_began is not null;
    get diagnostics v_lanes = row_count;
    return v_lanes;
end
$$;

create or replace function {schema}.resume_key(p_group integer, p_key text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_lanes bigint;
begin
    perform {schema}.lock_key(p_group, p_key);
    update {schema}.message_key_lease set paused_at = null, seek_began = null, changed_at = clock_timestamp()
    where group_id = p_group and message_key = p_key and paused_at is not null;
    get diagnostics v_lanes = row_count;
    return v_lanes;
end
$$;

-- Holds a key for a seek of it, where nobody holds it already, and answers when that began, by which the seek is known; null
-- where another seek holds it.
create or replace function {schema}.hold_key(p_group integer, p_key text) returns timestamptz
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_began timestamptz;
begin
    perform {schema}.lock_key(p_group, p_key);
    if exists (select from {schema}.message_key_lease where group_id = p_group and message_key = p_key and seek_began is not null) then
        return null;
    end if;
    v_began := clock_timestamp();
    insert into {schema}.message_key_lease as l (group_id, message_key, lane, paused_at, seek_began)
    select p_group, p_key, lane, v_began, v_began from {schema}.key_lanes(p_group, p_key) as lane
    on conflict (group_id, message_key, lane) do update
        set paused_at = excluded.paused_at, seek_began = excluded.seek_began, changed_at = excluded.paused_at
        where l.paused_at is null;
    return v_began;
end
$$;

-- On how many lanes a key has not been held ever since.
create or replace function {schema}.lanes_let_go(p_group integer, p_key text, p_began timestamptz) returns bigint
language sql stable set search_path = pg_catalog, pg_temp
as $$
    select count(*) from {schema}.key_lanes(p_group, p_key) as lane
    where not exists (
        select from {schema}.message_key_lease l
        where l.group_id = p_group and l.message_key = p_key and l.lane = lane and l.paused_at <= p_began)
$$;

-- Undoes the hold of a seek, but not that of an operator.
create or replace function {schema}.let_key_go(p_group integer, p_key text, p_began timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform {schema}.lock_key(p_group, p_key);
    update {schema}.message_key_lease set paused_at = null, seek_began = null, changed_at = clock_timestamp()
    where group_id = p_group and message_key = p_key and seek_began = p_began;
end
$$;

-- What a seek leaves of the lanes of a key: ready where something is deferred behind them, else free; blocked or resting no
-- longer; held where an operator holds them. Called last, under the group's lock, when no host has the key.
create or replace function {schema}.free_key(p_group integer, p_key text, p_began timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    insert into {schema}.message_key_lease (group_id, message_key, lane)
    select distinct p_group, p_key, lane from {schema}.exception
    where group_id = p_group and message_key = p_key and state = 'deferred'
    on conflict (group_id, message_key, lane) do nothing;
    update {schema}.message_key_lease
    set blocked_by = null, rests = false, buries = false, changed_at = clock_timestamp(),
        paused_at = case when seek_began is distinct from p_began then paused_at end, seek_began = nullif(seek_began, p_began)
    where group_id = p_group and message_key = p_key;
    delete from {schema}.message_key_lease l
    where group_id = p_group and message_key = p_key and paused_at is null and not exists (
        select from {schema}.exception e
        where e.group_id = p_group and e.message_key = p_key and e.lane = l.lane and e.state = 'deferred');
end
$$;

-- Keys that are held when their stream's rules have given them more lanes are held on those too.
create or replace function {schema}.hold_new_lanes(p_stream integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    insert into {schema}.message_key_lease as l (group_id, message_key, lane, paused_at, seek_began)
    select h.group_id, h.message_key, lane, h.paused_at, h.seek_began
    from (
        select distinct on (k.group_id, k.message_key) k.group_id, k.message_key, k.paused_at, k.seek_began
        from {schema}.consumer_group g join {schema}.message_key_lease k on k.group_id = g.id
        where g.stream_id = p_stream and k.paused_at is not null order by k.group_id, k.message_key, k.lane
    ) as h
    cross join lateral {schema}.key_lanes(h.group_id, h.message_key) as lane
    on conflict (group_id, message_key, lane) do update set paused_at = excluded.paused_at, seek_began = excluded.seek_began
        where l.paused_at is null;
end
$$;
