-- A page of dead letters, newest first, without their payloads. $1 group or null, $2 ids below this one, $3 how many at
-- most, $4 how many to look at, then the filter: $5 class, $6 key, $7 first and $8 last message id, $9 age in ms at most.
-- `looked_at_to` is the lowest id that was looked at; null when nothing is left below.
-- Called by engine::dead after bounded_read.sql. dead_letter_open and the primary key, read backwards: $4 rows at most, whatever the filter.
with looked_at as materialized (
    (select id, group_id, stream_id, message_id, message_key, attempts, class, error, died_at, redriven_at, replayed_at
        from {schema}.dead_letter
        where $1::integer is not null and group_id between $1 and $1 and redriven_at is null and id < $2
        order by group_id desc, id desc limit $4)
    union all
    (select id, group_id, stream_id, message_id, message_key, attempts, class, error, died_at, redriven_at, replayed_at
        from {schema}.dead_letter where $1::integer is null and id < $2 order by id desc limit $4)
),
page as (
    select * from looked_at
    where redriven_at is null
        and ($5::text is null or class = $5) and ($6::text is null or message_key = $6)
        and ($7::bigint is null or message_id >= $7) and ($8::bigint is null or message_id <= $8)
        and ($9::bigint is null or died_at >= clock_timestamp() - $9 * interval '1 ms')
    order by id desc limit $3
)
select (select case when count(*) = $4 then min(id) end from looked_at) as looked_at_to,
    p.id, g.name as "group", s.name as stream, p.message_id, p.message_key, p.attempts, p.class, p.error,
    to_char(p.died_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as died_at,
    to_char(p.replayed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as replayed_at
from (select 1) as always
left join page p on true
left join {schema}.consumer_group g on g.id = p.group_id
left join {schema}.stream s on s.id = p.stream_id
order by p.id desc nulls last
