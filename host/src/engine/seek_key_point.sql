-- The position before the point that a key of group $1 is sent to, and how far the group has claimed: an id ($2), a time
-- ($3), the end of what it has claimed ($4), else the beginning of the log. It cannot be sent further than the group has
-- come. Called by engine::seek_key; see functions/position.sql.
select c.claimed, least(c.claimed, case
    when $4 then c.claimed
    when $2::bigint is not null then greatest($2 - 1, floor.id)
    when $3::text is not null then {schema}.position_of_time_{stream_id}($3::text::timestamptz)
    else floor.id end) as after
from {schema}.cursor c, {schema}.log_floor_{stream_id}() as floor (id)
where c.group_id = $1
