-- Ends the sessions that keep backend $1 from the row of host $2, if they are that host's, or another's whose lease has run out, and
-- have waited for their client for a second: a host which is frozen, or gone without a word, does not take the answer of its turn,
-- or does not go on with its settle. Also behind others that wait for them. Callers' transactions, and hosts that renew
-- their lease, are waited for. Another role's are left alone, as we may not end them. Answers the processes that were ended.
-- Called by engine::frozen; a session is called by its host in database/connect.rs.
with recursive blocker (pid) as (
    select unnest(pg_blocking_pids($1))
    union
    select b.pid from blocker, unnest(pg_blocking_pids(blocker.pid)) as b (pid)
),
frozen as materialized (
    select a.pid
    from blocker join pg_stat_activity a using (pid)
    where a.wait_event_type = 'Client' and a.state_change < clock_timestamp() - interval '1 s'
        and a.datname = current_database() and a.usename = session_user
        and a.application_name in (
            select left('millstream ' || h.name, 63) from {schema}.host h where h.id = $2 or h.expires_at <= clock_timestamp())
)
select pid from frozen where pg_terminate_backend(pid)
