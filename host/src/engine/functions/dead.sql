-- Dead letters on their way again, or away. Installed by `engine::functions`; called by `engine::dead`.
--
-- Both take the advisory locks of the groups concerned: what they change of keys must not meet a turn.

-- Delivers dead letters again, as if for the first time and not before their deliver_after, and tells of each what came
-- of it:
--   redriven    its new delivery is scheduled; its row stays until that ends, with redriven_at
--   under_way   its message is being delivered already, or it is gone
--   superseded  a newer version of its key has won: it ends here, and nothing is delivered
--   refused     its ordered key has gone on without it: delivering it now would break the order. With p_append it is
--               delivered all the same, as the next of its key
-- A message that blocks its key takes its place again, before anything later. Those of a resting key go back to their
-- places behind it, and wait until the key is released.
create or replace function {schema}.redrive(p_ids bigint[], p_append boolean)
returns table (dead_letter_id bigint, outcome text)
language plpgsql set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_stream integer;
    v_found bigint[];
    v_lost bigint[] := '{}';
begin
    perform {schema}.lock_groups_of_dead(p_ids);
    for v_stream in
        select distinct stream_id from {schema}.dead_letter where id = any (p_ids) and compaction_rank is not null
    loop
        execute format('select array_agg(d.id) from {schema_format}.dead_letter d
            join {schema_format}.%I h on h.message_key = d.message_key and h.message_id <> d.message_id
            where d.id = any ($1) and d.stream_id = $2 and d.compaction_rank is not null and d.redriven_at is null',
            'compaction_head_' || v_stream) into v_found using p_ids, v_stream;
        v_lost := v_lost || coalesce(v_found, '{}');
    end loop;
    perform {schema}.forget_dead(v_lost);
    return query
    with given as materialized (
        select d.id, d.group_id, d.message_id, d.message_key, d.lane, d.concurrency, d.compaction_rank, d.redriven_at is null as is_open,
            case when d.deliver_after > clock_timestamp() then d.deliver_after end as not_before,
            d.concurrency <> 'ordered' or p_append or coalesce(l.rests, false) or l.blocked_by is not distinct from d.message_id as may_go,
            d.concurrency = 'ordered' and coalesce(l.rests, false) as rests
        from {schema}.dead_letter d
        left join {schema}.message_key_lease l on l.group_id = d.group_id and l.message_key = d.message_key and l.lane = d.lane
        where d.id = any (p_ids) order by d.id for update of d
    ),
    scheduled as (
        -- A message that is under way all the same (its group was sent back to it) is not delivered twice.
        insert into {schema}.exception as e (group_id, message_id, state, due_at, message_key, lane, concurrency, compaction_rank,
            dead_letter_id)
        select group_id, message_id, case when rests then 'deferred' else 'waiting' end::{schema}.exception_state,
            coalesce(not_before, case when not rests then clock_timestamp() end), message_key, lane, concurrency, compaction_rank, id
        from given where is_open and may_go order by id
        on conflict (group_id, message_id) do nothing
        returning e.dead_letter_id
    ),
    marked as (
        update {schema}.dead_letter d set redriven_at = clock_timestamp() from scheduled s where d.id = s.dead_letter_id
    )
    select i.id, case
        when i.id = any (v_lost) then 'superseded'
        when s.dead_letter_id is not null then 'redriven'
        when g.is_open and not g.may_go then 'refused'
        else 'under_way' end
    from unnest(p_ids) as i (id)
    left join given g on g.id = i.id
    left join scheduled s on s.dead_letter_id = i.id;
end
$$;

-- Forgets dead letters for good, and answers which. One that is being delivered again is left alone. A key that waits for
-- one of them goes on.
create or replace function {schema}.discard_dead(p_ids bigint[]) returns setof bigint
language plpgsql set search_path = pg_catalog, pg_temp
as $$
begin
    perform {schema}.lock_groups_of_dead(p_ids);
    return query select * from {schema}.forget_dead(p_ids);
end
$$;

create or replace function {schema}.forget_dead(p_ids bigint[]) returns setof bigint
language sql set search_path = pg_catalog, pg_temp
as $$
    with gone as (
        delete from {schema}.dead_letter d
        using (select id from {schema}.dead_letter where id = any (p_ids) and redriven_at is null order by id for update) as open
        where d.id = open.id
        returning d.id, d.group_id, d.message_id, d.message_key, d.lane
    ),
    ready as (
        update {schema}.message_key_lease l set blocked_by = null, changed_at = clock_timestamp()
        from gone g
        where l.group_id = g.group_id and l.message_key = g.message_key and l.lane = g.lane and l.blocked_by = g.message_id
    )
    select id from gone
$$;

create or replace function {schema}.lock_groups_of_dead(p_ids bigint[]) returns void
language sql set search_path = pg_catalog, pg_temp
as $$
    select pg_advisory_xact_lock({lock_class} + 1, g.group_id)
    from (select distinct group_id from {schema}.dead_letter where id = any (p_ids) order by group_id offset 0) as g
$$;
