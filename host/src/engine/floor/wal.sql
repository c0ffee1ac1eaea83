-- Bytes of WAL written since the cluster began.
select (pg_current_wal_insert_lsn() - '0/0')::bigint
