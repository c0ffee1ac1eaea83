-- Which database processes hold the claims of a group ($1), or the maintenance step ($2), that a seek waited for in vain.
-- Called by engine::seek.
select coalesce(string_agg(distinct pid::text, ', '), '') from pg_locks
where locktype = 'advisory' and objsubid = 2 and granted
    and database = (select oid from pg_database where datname = current_database())
    and (classid, objid) in (({lock_class} + 1, $1::oid), ({lock_class} + 4, $2::oid))
