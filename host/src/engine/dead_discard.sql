-- Forgets dead letters for good. $1 their ids. One that is being delivered again is left alone.
-- Called by engine::dead; primary key, locked in order.
delete from {schema}.dead_letter d
using (select id from {schema}.dead_letter where id = any ($1) and redriven_at is null order by id for update) as open
where d.id = open.id
