-- Open dead letters of group $1 that a filter picks, oldest first. $2 above this id, $3 up to this one, $4 how many to
-- look at, then the filter: $5 class, $6 key, $7 first and $8 last message id, $9 age in ms at most.
-- Called by engine::dead in steps, after bounded_read.sql; dead_letter_open, $4 rows at most.
with looked_at as materialized (
    select id, class, message_key, message_id, died_at from {schema}.dead_letter
    where group_id between $1 and $1 and redriven_at is null and id > $2 and id <= $3 order by group_id, id limit $4
)
select (select case when count(*) = $4 then max(id) end from looked_at) as looked_at_to,
    coalesce(array_agg(id order by id), '{}') as ids
from looked_at
where ($5::text is null or class = $5) and ($6::text is null or message_key = $6)
    and ($7::bigint is null or message_id >= $7) and ($8::bigint is null or message_id <= $8)
    and ($9::bigint is null or died_at >= clock_timestamp() - $9 * interval '1 ms')
