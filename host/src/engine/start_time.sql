-- A new group begins at the first message produced at or after a time, else at the end. Read in one snapshot; scans the
-- log once. Called by engine::declare.
insert into {schema}.cursor (group_id, claimed)
select $1, coalesce(
    (select min(id) - 1 from {schema}.message_log_{stream_id} where created_at >= $2::timestamptz),
    (select max(id) from {schema}.message_log_{stream_id}), 0)
