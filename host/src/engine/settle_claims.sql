-- Takes messages out of their claims. $1 group, $2 host, $3 and $4 pairs of claim and message. Answers the claims that
-- still were ours with all these messages pending; of the others nothing was settled: a settle done twice changes nothing. Called by engine::settle after fence.sql; claim primary key.
with leaving as (
    select claim_id, range_agg(int8range(message_id, message_id, '[]')) as ids
    from unnest($3::bigint[], $4::bigint[]) as l (claim_id, message_id)
    group by claim_id
),
emptied as (
    delete from {schema}.claim c using leaving l
    where c.id = l.claim_id and c.host_id = $2 and c.group_id = $1 and c.pending = l.ids
    returning c.id
),
shrunk as (
    update {schema}.claim c set pending = c.pending - l.ids from leaving l
    where c.id = l.claim_id and c.host_id = $2 and c.group_id = $1 and not c.pending = l.ids
    returning c.id
)
select id from emptied union all select id from shrunk
