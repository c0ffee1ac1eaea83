-- Tells other hosts that a stream has new messages. Called after the commit, from a connection of its own, debounced.
select pg_notify($1, $2)
