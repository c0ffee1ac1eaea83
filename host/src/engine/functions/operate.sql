-- What an operator does to one key of a group, each in a transaction of its own under the group's advisory lock, so that it
-- meets no turn. With `shards`, all lanes of the key are meant. Installed by `engine::functions`; called by `engine::keys`
-- and `engine::seek_key`.

-- Ends the rest of a key: what is deferred behind it runs, what was redriven in its place. Answers how many lanes rested.
create or replace function {schema}.release_key(p_group integer, p_key text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_lanes bigint;
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
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
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
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

-- Holds a key, or lets it go on: a host that has it finishes what it took, and nothing more of it runs until then. Answers
-- how many lanes that changed; those of older rules are among them. A key held without a mode has no effect: its messages do not ask.
create or replace function {schema}.pause_key(p_group integer, p_key text) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_lanes bigint;
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    insert into {schema}.message_key_lease as l (group_id, message_key, lane, paused_at)
    select p_group, p_key, lane, clock_timestamp()
    from generate_series(0, (
        select greatest(s.past_shards, (
            select r.shards from {schema}.key_rule r where r.stream_id = s.id and p_key like r.pattern order by r.ordinal limit 1)) - 1
        from {schema}.consumer_group g join {schema}.stream s on s.id = g.stream_id where g.id = p_group)) as lane
    on conflict (group_id, message_key, lane) do update set paused_at = excluded.paused_at, changed_at = excluded.paused_at
        where l.paused_at is null;
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
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    update {schema}.message_key_lease set paused_at = null, changed_at = clock_timestamp()
    where group_id = p_group and message_key = p_key and paused_at is not null;
    get diagnostics v_lanes = row_count;
    return v_lanes;
end
$$;

-- Holds a key for a seek of it, and answers the lanes that an operator held before.
create or replace function {schema}.hold_key(p_group integer, p_key text) returns smallint[]
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_held smallint[];
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    select coalesce(array_agg(lane), '{}') into v_held
    from {schema}.message_key_lease where group_id = p_group and message_key = p_key and paused_at is not null;
    perform {schema}.pause_key(p_group, p_key);
    return v_held;
end
$$;

-- Undoes that, but for what an operator held.
create or replace function {schema}.let_key_go(p_group integer, p_key text, p_held smallint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock({lock_class} + 1, p_group);
    update {schema}.message_key_lease set paused_at = null, changed_at = clock_timestamp()
    where group_id = p_group and message_key = p_key and paused_at is not null and lane <> all (p_held);
end
$$;

-- What a seek leaves of the lanes of a key: ready where something is deferred behind them, else free; blocked or resting no
-- longer; held where an operator held them. Called last, under the group's lock, when no host has the key.
create or replace function {schema}.free_key(p_group integer, p_key text, p_held smallint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    insert into {schema}.message_key_lease (group_id, message_key, lane)
    select distinct p_group, p_key, lane from {schema}.exception
    where group_id = p_group and message_key = p_key and state = 'deferred'
    on conflict (group_id, message_key, lane) do nothing;
    delete from {schema}.message_key_lease l
    where group_id = p_group and message_key = p_key and lane <> all (p_held) and not exists (
        select from {schema}.exception e
        where e.group_id = p_group and e.message_key = p_key and e.lane = l.lane and e.state = 'deferred');
    update {schema}.message_key_lease
    set blocked_by = null, rests = false, buries = false, changed_at = clock_timestamp(),
        paused_at = case when lane = any (p_held) then paused_at end
    where group_id = p_group and message_key = p_key;
end
$$;
