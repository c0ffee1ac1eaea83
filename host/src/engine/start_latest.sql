-- A group ($1) begins with what commits from now on, including by transactions that are running now: the cursor is the highest
-- visible id, and holes below it that a running producer may still fill become a gap. The holders are read from pg_locks
-- after the snapshot that showed the holes. Without producers the log is not scanned; with them its ids are, all of them:
-- where to begin could only be told by times, and a clock that was set back would then lose messages.
-- A group that was elsewhere has no gap left when this runs. Called by engine::position.
with head as materialized (
    select coalesce(max(id), {schema}.log_floor_{stream_id}()) as id from {schema}.message_log_{stream_id}
),
held as materialized (
    select array_agg(l.virtualtransaction) as holders, array_agg(l.pid) as pids
    from head, pg_locks l
    where head.id >= 0 and l.locktype = 'advisory' and l.classid = {lock_class} and l.objid = {stream_id} and l.objsubid = 2
        and l.granted and l.database = (select oid from pg_database where datname = current_database())
),
hole as (
    select range_agg(int8range(below + 1, id)) as missing
    from (
        select id, lag(id, 1, {schema}.log_floor_{stream_id}()) over (order by id) as below
        from {schema}.message_log_{stream_id} where (select holders is not null from held)
    ) as pairs
    where id > below + 1
),
gap as (
    insert into {schema}.cursor_gap (group_id, missing, holders, pids)
    select $1, hole.missing, held.holders, held.pids from hole, held where hole.missing is not null and held.holders is not null
)
select id from head
