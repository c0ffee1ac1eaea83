-- The transactions that hold a stream's producer lock now, oldest process first where that can be told. Read before the
-- snapshot that shows what is visible: an id that is missing there and has no producer here will never come.
-- Called by engine::why.
select coalesce(array_agg(l.virtualtransaction), '{}') as holders, coalesce(array_agg(l.pid), '{}') as pids
from pg_locks l
where l.locktype = 'advisory' and l.classid = {lock_class} and l.objid = {stream_id} and l.objsubid = 2 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
