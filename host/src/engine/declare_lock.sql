-- One declaration at a time in this schema. First statement of every apply and of every forget.
select pg_advisory_xact_lock({lock_class} + 3, 0)
