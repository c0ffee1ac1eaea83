-- What the model notes beside the trace: every lease a host had, and what became of every dead letter.
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
    at timestamptz default clock_timestamp()
);
create function {schema}.model_note_dead() returns trigger language plpgsql as $$
begin
    insert into {schema}.model_dead (group_id, message_id, what, class, attempts)
    select d.group_id, d.message_id, case
        when tg_op = 'DELETE' then 'gone' when d.redriven_at is not null then 'redriven' else 'open' end, d.class, d.attempts
    from (select (case when tg_op = 'DELETE' then old else new end).*) as d;
    return null;
end
$$;
create trigger model after insert or update or delete on {schema}.dead_letter
    for each row execute function {schema}.model_note_dead();
