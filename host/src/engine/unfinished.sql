-- Whether groups hold anything, and where their cursors stand. Called by `up --drain`; the groups' indexes.
select exists (select from {schema}.claim where group_id = g.id)
        or exists (select from {schema}.exception where group_id = g.id)
        or exists (select from {schema}.cursor_gap where group_id = g.id) as busy,
    g.stream_id, c.claimed
from {schema}.consumer_group g join {schema}.cursor c on c.group_id = g.id
where g.name = any ($1)
