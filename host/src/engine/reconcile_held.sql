-- What the database says a host holds in a group: ranges of messages under their claims. Called by engine::reconcile.
select claim_id, from_id, to_id, is_exception
from (
    select c.id as claim_id, lower(r.ids) as from_id, upper(r.ids) - 1 as to_id, false as is_exception
    from {schema}.claim c, unnest(c.pending) as r (ids)
    where c.host_id = $2 and c.group_id = $1 and c.id > 0
    union all
    select e.claim_id, e.message_id, e.message_id, true
    from {schema}.exception e
    where e.host_id = $2 and e.group_id = $1 and e.state = 'running'
) as h
