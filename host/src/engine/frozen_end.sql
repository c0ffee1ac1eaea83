-- Ends the transactions of dead hosts that keep backend $1, which recovers host $2, waiting and have themselves waited for their
-- client for a second: a host which is frozen, or gone without a word, does not take the answer of its turn, or does not go
-- on with its settle. Also behind others that wait for them, and all of such a host at once, since of those that share a lock
-- only one is told. Callers' transactions are waited for, and hosts that renew a lease: they are not frozen, and their
-- sessions end by themselves. Another role's are left alone, as we may not end them. Answers the processes that were ended.
-- Called by engine::frozen; the name of a session is given in database/connect.rs.
with recursive blocker (pid) as (
    select unnest(pg_blocking_pids($1))
    union
    select b.pid from blocker, unnest(pg_blocking_pids(blocker.pid)) as b (pid)
),
dead as (
    select sessions from {schema}.host group by sessions
    having sessions <> '' and not bool_or(expires_at > clock_timestamp() and id <> $2)
),
still as materialized (
    select a.pid, d.sessions
    from pg_stat_activity a join dead d on a.application_name like 'millstream %' and split_part(a.application_name, ' ', 2) = d.sessions
    where a.wait_event_type = 'Client' and a.xact_start is not null and a.state_change < clock_timestamp() - interval '1 s'
        and a.datname = current_database() and a.usename = session_user
)
select pid from still
where sessions in (select s.sessions from still s join blocker using (pid)) and pg_terminate_backend(pid)
