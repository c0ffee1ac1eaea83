-- Whether groups hold anything, and where their cursors stand. A paused group has nothing to do but to end what runs: it
-- is taken to stand at the end of any log, and what waits in it does not count. What is deferred counts with its key: one
-- that is leased or ready; one that waits for a dead letter, is held, or rests, waits for people.
-- Called by `up --drain`; the groups' indexes.
select exists (select from {schema}.claim where group_id = g.id and id > 0)
        or exists (select from {schema}.exception where group_id = g.id and state <> 'deferred' and (g.paused_at is null or state = 'running'))
        or (g.paused_at is null and exists (
            select from {schema}.message_key_lease
            where group_id = g.id and blocked_by is null and paused_at is null and not rests))
        or (g.paused_at is null and exists (select from {schema}.cursor_gap where group_id = g.id)) as busy,
    g.stream_id, case when g.paused_at is null then c.claimed else 9223372036854775806 end as claimed
from {schema}.consumer_group g join {schema}.cursor c on c.group_id = g.id
where g.name = any ($1)
