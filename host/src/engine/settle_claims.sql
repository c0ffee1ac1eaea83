-- Takes messages out of their claims. $1 group, $2 host, $3 and $4 pairs of claim and message. Answers the claims that
-- still were ours with all these messages pending; of the others nothing was settled: a settle done twice changes nothing.
-- The claims are locked first, in order: two settles of one claim at once then see each other's work, and cannot deadlock.
-- Called by engine::settle after fence.sql; claim primary key.
with leaving as (
    select claim_id, range_agg(int8range(message_id, message_id, '[]')) as ids
    from unnest($3::bigint[], $4::bigint[]) as l (claim_id, message_id)
    group by claim_id
),
locked as materialized (
    select c.id, c.pending, l.ids
    from {schema}.claim c join leaving l on l.claim_id = c.id
    where c.host_id = $2 and c.group_id = $1 and c.pending @> l.ids
    order by c.id
    for update of c
),
emptied as (
    delete from {schema}.claim c using locked k where c.id = k.id and k.pending = k.ids
    returning c.id
),
shrunk as (
    update {schema}.claim c set pending = k.pending - k.ids from locked k where c.id = k.id and k.pending <> k.ids
    returning c.id
)
select id from emptied union all select id from shrunk
