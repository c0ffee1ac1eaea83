-- One maintenance step runs on one host at a time. First statement of each of its transactions; never waits.
select pg_try_advisory_xact_lock({lock_class} + 4, $1)
