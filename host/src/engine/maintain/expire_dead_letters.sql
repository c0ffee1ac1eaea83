-- Deletes at most $1 dead letters older than their stream's dead_letter_retention. A redriven one is kept while its new
-- delivery runs: it holds the only copy of the message. One that blocks its key is kept until somebody decides: the key
-- must not wait for nothing. Index: dead_letter_age.
-- Twice at once, and beside a redrive: rows are locked first and looked at again then; a redrive that was quicker has
-- set `redriven_at` to now, which keeps the row.
delete from {schema}.dead_letter d
using (
    select old.id
    from {schema}.stream s, lateral (
        select l.id from {schema}.dead_letter l
        where l.stream_id = s.id and l.died_at < clock_timestamp() - s.dead_letter_retention_ms * interval '1 ms'
            and (l.redriven_at is null or l.redriven_at < clock_timestamp() - s.dead_letter_retention_ms * interval '1 ms'
                and not exists (select from {schema}.exception e where e.group_id = l.group_id and e.message_id = l.message_id))
            and not exists (
                select from {schema}.message_key_lease k
                where k.group_id = l.group_id and k.message_key = l.message_key and k.lane = l.lane and k.blocked_by = l.message_id)
        order by l.died_at limit $1 for update skip locked
    ) as old
    limit $1
) as old
where d.id = old.id
