-- A new group begins at the first message produced at or after a time, else at the end. The cursor stands at the visible
-- message before it: what a running producer may still commit in between is then a hole like any other. Read in one
-- snapshot; scans the log once. Called by engine::declare.
with first as materialized (
    select min(id) as id from {schema}.message_log_{stream_id} where created_at >= $2::timestamptz
)
insert into {schema}.cursor (group_id, claimed)
select $1, coalesce((select max(l.id) from {schema}.message_log_{stream_id} l where first.id is null or l.id < first.id), 0)
from first
