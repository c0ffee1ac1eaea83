-- SQL of handlers: one pair of functions for each role that a group's `allow.sql` names. `engine::guest_sql` calls them.
--
-- A role that is merely set can be unset by the guest: set_config('role', ...) is a plain SELECT. Inside a SECURITY DEFINER
-- function Postgres itself refuses every change of role, and COMMIT at any depth. So a guest's statement runs inside two:
--
--   guest_sql_X   owned by the host's user, who alone may call it. It gives the guest the search_path and the formats it
--                 can count on. That it is a definer keeps role changes refused whatever R does to the next.
--   run_as_X      owned by the role R, so that all in it runs with the rights of R and no others: also the parsing, since
--                 the literals of a statement can call functions (an array over a domain with a check). R may alter its
--                 attributes, but cannot replace its body, for which it would need CREATE on this schema.
--
-- X is a hash of the role's name: whoever calls does not have to look it up.
--
-- Nothing in them depends on the search_path, operators and types included.

-- Lets groups run SQL as this role. Called when streams.toml is applied.
create or replace function {schema}.allow_sql(p_role text) returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $allow$
declare
    v_role pg_roles;
    v_before text := current_setting('role');
    v_host text := current_user;
    v_had_usage boolean;
    v_refused text;
    v_name text := left(encode(sha256(convert_to(p_role, 'UTF8')), 'hex'), 32);
begin
    select * into v_role from pg_roles where rolname = p_role;
    if not found then
        raise exception 'role "%" does not exist', p_role using errcode = 'MS011',
            hint = format('create it: create role %I nologin; grant %I to %I', p_role, p_role, v_host);
    end if;
    v_refused := case
        when p_role like '%$%' then 'has a dollar in its name'
        when v_role.rolsuper then 'is a superuser'
        when v_role.rolcreaterole then 'may create roles (CREATEROLE)'
        when v_role.rolreplication then 'may read the whole cluster (REPLICATION)'
        when p_role = session_user or p_role = v_host or pg_has_role(p_role, v_host, 'MEMBER') then
            'has the rights of the host''s own user'
        when has_schema_privilege(p_role, '{schema_text}'::regnamespace, 'CREATE') then 'may create objects in the host''s own schema'
        else (
            select format('is a member of %s', r.rolname) from pg_roles r
            where r.rolname in ('pg_read_all_data', 'pg_write_all_data', 'pg_read_server_files', 'pg_write_server_files',
                'pg_execute_server_program', 'pg_database_owner') and pg_has_role(p_role, r.oid, 'MEMBER') limit 1)
    end;
    if v_refused is not null then
        raise exception 'role "%" %', p_role, v_refused using errcode = 'MS011',
            hint = 'a handler''s SQL runs as this role: name one that may do only what the handler needs';
    end if;
    if not pg_has_role(v_host, p_role, 'MEMBER') then
        raise exception 'user "%" may not act as role "%"', v_host, p_role using errcode = 'MS011',
            hint = format('grant %I to %I', p_role, v_host);
    end if;
    v_had_usage := has_schema_privilege(p_role, '{schema_text}'::regnamespace, 'USAGE');
    execute format('grant usage, create on schema {schema_format} to %I', p_role);
    execute format('set local role %I', p_role);
    execute format($sql$
create or replace function {schema_format}.run_as_%1$s(p_step text, p_prepare text, p_execute text, p_rows_max bigint, p_bytes_max bigint)
returns setof text language plpgsql security definer
as $run$
#variable_conflict use_variable
declare
    v_cursor pg_catalog.refcursor;
    v_row pg_catalog.record;
    v_line pg_catalog.text;
    v_rows pg_catalog.int8 := 0;
    v_bytes pg_catalog.int8 := 0;
begin
    if current_user operator(pg_catalog.<>) %2$L::pg_catalog.name then
        raise exception 'a function of millstream was altered; apply streams.toml again' using errcode = 'MS012';
    end if;
    if p_step operator(pg_catalog.=) 'constraints'::pg_catalog.text then
        execute 'set constraints all immediate';
        return;
    end if;
    -- Alone, it parses what it is given, as R. A statement that returns no rows is no cursor: Postgres refuses SET, COPY,
    -- DO, CALL and COMMIT here by what they are.
    execute p_prepare;
    open v_cursor no scroll for execute p_execute;
    if p_step operator(pg_catalog.=) 'rows'::pg_catalog.text then
        -- Names and types of the columns, on every version of Postgres.
        return next pg_catalog.cursor_to_xmlschema(v_cursor, true, true, ''::pg_catalog.text)::pg_catalog.text;
    end if;
    loop
        fetch v_cursor into v_row;
        exit when not found;
        v_rows := v_rows operator(pg_catalog.+) 1::pg_catalog.int8;
        if p_step operator(pg_catalog.=) 'rows'::pg_catalog.text then
            v_line := pg_catalog.row_to_json(v_row)::pg_catalog.text;
            v_bytes := v_bytes operator(pg_catalog.+) pg_catalog.octet_length(v_line)::pg_catalog.int8;
            if v_rows operator(pg_catalog.>) p_rows_max or v_bytes operator(pg_catalog.>) p_bytes_max then
                raise exception 'too many rows or bytes' using errcode = 'MS013';
            end if;
            return next v_line;
        end if;
    end loop;
    close v_cursor;
    if p_step operator(pg_catalog.=) 'count'::pg_catalog.text then
        return next v_rows::pg_catalog.text;
    end if;
end
$run$ $sql$, v_name, p_role);
    execute format('revoke all on function {schema_format}.run_as_%s(text, text, text, bigint, bigint) from public', v_name);
    execute format('grant execute on function {schema_format}.run_as_%s(text, text, text, bigint, bigint) to %I', v_name, v_host);
    execute format('set local role %I', v_before);
    execute format('revoke create on schema {schema_format} from %I', p_role);
    if not v_had_usage then
        execute format('revoke usage on schema {schema_format} from %I', p_role);
    end if;
    execute format($sql$
create or replace function {schema_format}.guest_sql_%1$s(p_step text, p_prepare text, p_execute text, p_rows_max bigint, p_bytes_max bigint)
returns setof text language plpgsql security definer
set search_path = "$user", public, pg_temp set timezone = 'UTC' set datestyle = 'ISO' set bytea_output = 'hex'
set extra_float_digits = 1 set standard_conforming_strings = on
as $run$
begin
    return query select line from {schema_format}.run_as_%1$s(p_step, p_prepare, p_execute, p_rows_max, p_bytes_max) as line;
end
$run$ $sql$, v_name);
    execute format('revoke all on function {schema_format}.guest_sql_%s(text, text, text, bigint, bigint) from public', v_name);
end
$allow$;

-- Takes the functions of roles away that no group names any more, so that those roles can be dropped.
create or replace function {schema}.forget_sql_roles() returns void
language plpgsql set search_path = pg_catalog, pg_temp
as $$
declare
    v_function regprocedure;
begin
    for v_function in
        select p.oid from pg_proc p
        where p.pronamespace = '{schema_text}'::regnamespace and p.proname ~ '^(guest_sql|run_as)_[0-9a-f]{32}$'
            and right(p.proname, 32) not in (
                select left(encode(sha256(convert_to(g.policy->'allow'->>'sql_role', 'UTF8')), 'hex'), 32)
                from {schema}.consumer_group g where g.policy->'allow'->>'sql_role' is not null)
    loop
        execute format('drop function %s', v_function);
    end loop;
end
$$;
