-- Keys that nobody would ever run; see Project::stuck_keys. One statement, so that it sees no turn half done.
select (
    select count(*) from (
        select distinct group_id, message_key, lane from {schema}.exception where state = 'deferred'
        except select group_id, message_key, lane from {schema}.message_key_lease
    ) as k
) + (
    select count(*) from {schema}.message_key_lease l
    where l.rests and not l.buries and exists (
        select from {schema}.exception e
        where e.group_id = l.group_id and e.message_key = l.message_key and e.lane = l.lane and e.state = 'deferred'
            and e.dead_letter_id is null)
) + (
    select count(*) from {schema}.message_key_lease l
    where l.host_id is not null and not exists (select from {schema}.host where id = l.host_id)
        or l.blocked_by is not null
            and not exists (select from {schema}.exception e where e.group_id = l.group_id and e.message_id = l.blocked_by)
            and not exists (select from {schema}.dead_letter d where d.group_id = l.group_id and d.message_id = l.blocked_by)
)
