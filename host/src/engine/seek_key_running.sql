-- Which of messages $2 hosts of group $1 hold in a claim, and who they are. A claim of messages without a key mode is not stopped
-- by a hold of the key. Called by engine::seek_key; claim_group.
with wanted as materialized (
    select range_agg(int8range(id, id + 1)) as ids from unnest($2::bigint[]) as l (id)
)
select coalesce(string_agg(distinct h.name, ', '), '') as hosts, coalesce(array_agg(distinct m.id), '{}') as ids
from wanted
join {schema}.claim k on k.group_id = $1 and k.id > 0
cross join lateral unnest(k.pending) as r (ids)
cross join lateral generate_series(lower(r.ids), upper(r.ids) - 1) as m (id)
left join {schema}.host h on h.id = k.host_id
where wanted.ids @> m.id
