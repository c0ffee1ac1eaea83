-- Ordered keys that stop at a message. $1 group, $2 host that has them, then arrays: key, lane, the message, whether the key
-- rests from now on; else it waits for the message, of several for the first. Called by engine::settle and
-- engine::recover in the transaction that takes the message out; message_key_lease primary key.
update {schema}.message_key_lease l
set host_id = null, blocked_by = case when not s.rests then s.message_id end, rests = s.rests, buries = s.rests, changed_at = clock_timestamp()
from (
    select distinct on (message_key, lane) *
    from unnest($3::text[], $4::smallint[], $5::bigint[], $6::boolean[]) as s (message_key, lane, message_id, rests)
    order by message_key, lane, message_id
) as s
where l.group_id = $1 and l.message_key = s.message_key and l.lane = s.lane and l.host_id = $2
