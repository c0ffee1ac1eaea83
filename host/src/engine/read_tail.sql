-- The positions before the last $1 messages that are visible, and after all of them. Called by engine::read; message_log
-- primary key, backwards.
select coalesce(min(id) - 1, 0), coalesce(max(id), 0)
from (select id from {schema}.message_log_{stream_id} order by id desc limit $1) as l
