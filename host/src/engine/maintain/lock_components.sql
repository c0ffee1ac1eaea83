-- Waits for the components step to end its transaction, so that it cannot delete what is being recorded.
select pg_advisory_xact_lock({lock_class} + 4, $1)
