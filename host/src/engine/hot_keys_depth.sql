-- What waits behind some keys of group $1 ($2, with lanes $3): depth counted up to $4, and what the key itself waits for.
-- Called by engine::hot_keys after bounded_read.sql; exception_deferred, message_key_lease and exception primary keys.
select k.message_key, k.lane, d.depth + (e.message_id is not null)::integer as depth, d.depth < $4 as depth_exact,
    l.blocked_by, e.failures
from unnest($2::text[], $3::smallint[]) as k (message_key, lane)
cross join lateral (
    select count(*) as depth from (
        select from {schema}.exception
        where group_id = $1 and message_key = k.message_key and lane = k.lane and state = 'deferred' limit $4
    ) as e
) as d
left join lateral (
    select blocked_by from {schema}.message_key_lease
    where group_id = $1 and message_key = k.message_key and lane = k.lane limit 1
) as l on true
left join {schema}.exception e on e.group_id = $1 and e.message_id = l.blocked_by
