-- What the model notes beside the trace: every lease a host had, what became of every dead letter, every claim, and when a
-- group or a key was sent elsewhere.
create table {schema}.model_lease (
    seq bigint generated always as identity, host_id bigint, name text, expires_at timestamptz, at timestamptz default clock_timestamp()
);
create function {schema}.model_note_lease() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_lease (host_id, name, expires_at) values (new.id, new.name, new.expires_at);
    return null;
end
$$;
create trigger model after insert or update of expires_at on {schema}.host
    for each row execute function {schema}.model_note_lease();
create table {schema}.model_dead (
    seq bigint generated always as identity, group_id integer, message_id bigint, what text, class text, attempts integer,
    at timestamptz default clock_timestamp(), xact xid8 default pg_current_xact_id()
);
create function {schema}.model_note_dead() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_dead (group_id, message_id, what, class, attempts)
    select d.group_id, d.message_id, case
        when tg_op = 'DELETE' then 'gone' when d.redriven_at is not null then 'redriven' when d.replayed_at is not null then 'replayed'
        -- By a seek, and not by another death.
        when tg_op = 'UPDATE' and new.deaths = old.deaths then 'reopened' else 'open' end, d.class, d.attempts
    from (select (case when tg_op = 'DELETE' then old else new end).*) as d;
    return null;
end
$$;
create trigger model after insert or update or delete on {schema}.dead_letter
    for each row execute function {schema}.model_note_dead();
create table {schema}.model_claim (
    seq bigint generated always as identity, group_id integer, host_id bigint, ids int8multirange, began timestamptz default now(),
    at timestamptz default clock_timestamp()
);
create function {schema}.model_note_claim() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_claim (group_id, host_id, ids) values (new.group_id, new.host_id, new.pending);
    return null;
end
$$;
create trigger model after insert on {schema}.claim for each row execute function {schema}.model_note_claim();
create function {schema}.model_note_running() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_claim (group_id, host_id, ids)
    values (new.group_id, new.host_id, int8multirange(int8range(new.message_id, new.message_id, '[]')));
    return null;
end
$$;
create trigger model after update on {schema}.exception for each row when (new.state = 'running')
    execute function {schema}.model_note_running();
create table {schema}.model_sent (
    group_id integer, message_key text, at timestamptz default clock_timestamp(), xact xid8 default pg_current_xact_id()
);
create function {schema}.model_note_seek() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_sent (group_id) values (new.id);
    return null;
end
$$;
create trigger model after update of epoch on {schema}.consumer_group for each row execute function {schema}.model_note_seek();
create function {schema}.model_note_let_go() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_sent (group_id, message_key) values (old.group_id, old.message_key);
    return null;
end
$$;
create trigger model_gone after delete on {schema}.message_key_lease
    for each row when (old.paused_at is not null) execute function {schema}.model_note_let_go();
create trigger model_goes_on after update on {schema}.message_key_lease
    for each row when (old.paused_at is not null and new.paused_at is null) execute function {schema}.model_note_let_go();
