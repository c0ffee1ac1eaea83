-- Ends the sessions that keep backend $1 waiting and have themselves waited for their client for a second: that of a host which is
-- frozen, or gone without a word, does not take the answer of its turn, or does not go on with its settle. Sessions of other
-- roles are left alone. Answers the processes that were ended. Called by engine::frozen.
with frozen as materialized (
    select a.pid
    from unnest(pg_blocking_pids($1)) as b (pid)
    join pg_stat_activity a on a.pid = b.pid
    where a.wait_event_type = 'Client' and a.state_change < clock_timestamp() - interval '1 s' and a.usename = session_user
)
select pid from frozen where pg_terminate_backend(pid)
