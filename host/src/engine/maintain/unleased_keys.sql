-- Keys with deferred messages that nobody would ever take, which there must never be: with no lease row, or resting and with
-- nobody told to bury. Of the $4 keys after $1 group, $2 key, $3 lane, those, and the last one looked at. One statement, so
-- that it sees no turn half done. Called by engine::maintain::keys.
--
-- Goes from key to key by one index probe each, so a deep key costs as much as a shallow one: exception_deferred,
-- message_key_lease primary key.
with recursive key as (
    (
        select group_id, message_key, lane from {schema}.exception
        where state = 'deferred' and (group_id, message_key, lane) > ($1::integer, $2::text, $3::smallint)
        order by group_id, message_key, lane limit 1
    )
    union all
    select n.group_id, n.message_key, n.lane
    from key k, lateral (
        select group_id, message_key, lane from {schema}.exception
        where state = 'deferred' and (group_id, message_key, lane) > (k.group_id, k.message_key, k.lane)
        order by group_id, message_key, lane limit 1
    ) as n
),
seen as materialized (
    select *, row_number() over () as place from (select * from key limit $4) as k
)
select s.group_id, g.name as group_name, s.message_key, s.lane, s.place, l.is_taken_care_of is not true as is_unleased
from seen s
left join lateral (
    -- What was redriven waits behind a resting key until that is released.
    select not k.rests or k.buries or not exists (
            select from {schema}.exception e
            where e.group_id = s.group_id and e.message_key = s.message_key and e.lane = s.lane and e.state = 'deferred'
                and e.dead_letter_id is null) as is_taken_care_of
    from {schema}.message_key_lease k
    where k.group_id = s.group_id and k.message_key = s.message_key and k.lane = s.lane limit 1
) as l on true
join {schema}.consumer_group g on g.id = s.group_id
where l.is_taken_care_of is not true or s.place = $4
order by s.place
