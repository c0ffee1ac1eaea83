-- Which of messages $2 hosts of group $1 run, under which claims, and who they are; of deliveries that were running before ($2 and
-- their claims $3), those that still are. What has no mode is not stopped by a hold of its key. Called by engine::seek_key;
-- claim_group, exception primary key.
with wanted as materialized (
    select range_agg(int8range(id, id + 1)) as ids from unnest($2::bigint[]) as l (id)
),
running as (
    select m.id, k.id as claim_id, k.host_id
    from wanted
    join {schema}.claim k on k.group_id = $1 and k.id > 0
    cross join lateral unnest(k.pending) as r (ids)
    cross join lateral generate_series(lower(r.ids), upper(r.ids) - 1) as m (id)
    where wanted.ids @> m.id
    union all
    select message_id, claim_id, host_id from {schema}.exception
    where group_id = $1 and message_id = any ($2) and state = 'running'
)
select coalesce(string_agg(distinct h.name, ', '), '') as hosts, coalesce(array_agg(r.id), '{}') as ids,
    coalesce(array_agg(r.claim_id), '{}') as claims
from running r left join {schema}.host h on h.id = r.host_id
where $3::bigint[] is null or (r.id, r.claim_id) in (select * from unnest($2::bigint[], $3::bigint[]))
