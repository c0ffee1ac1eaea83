-- Where a group ($1) stands after a seek: its position, and the first message there is after it. `removed`: retention has
-- dropped messages at or after the asked point, an id ($2) or a time ($3). `survivors_only`: it was sent back from $4, and
-- of compacted keys only the winners come again; compaction_head is probed for any row. Of a time that is certain to be younger than
-- the stream's retention it has not. Called by engine::seek after the cursor is placed.
select c.claimed, first.id as first_id,
    to_char(first.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as first_produced_at,
    floor.id > 0 and c.claimed = floor.id and (
        coalesce($2::bigint <= floor.id, false)
        or coalesce($3::timestamptz < clock_timestamp() - coalesce(s.retention_ms, 0) * interval '1 ms', false)
    ) as removed,
    coalesce(first.created_at < clock_timestamp() - s.max_lag_ms * interval '1 ms', false) as beyond_max_lag,
    c.claimed < $4 and exists (select from {schema}.compaction_head_{stream_id}) as survivors_only
from {schema}.cursor c
join {schema}.stream s on s.id = {stream_id}
cross join {schema}.log_floor_{stream_id}() as floor (id)
left join {schema}.log_heads_{stream_id}(c.claimed, 1) as first on true
where c.group_id = $1
