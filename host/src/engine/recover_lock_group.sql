-- Nobody claims for the group until the end of this transaction. $1 group. Called by engine::recover and engine::reconcile.
select pg_advisory_xact_lock({lock_class} + 1, $1)
