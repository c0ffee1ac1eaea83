-- Takes running exceptions out, by their tokens. $1 group, $2 host, $3 and $4 pairs of claim and message. Answers those
-- that were still ours. Called by engine::settle after fence.sql; exception primary key.
delete from {schema}.exception e
using unnest($3::bigint[], $4::bigint[]) as l (claim_id, message_id)
where e.group_id = $1 and e.message_id = l.message_id and e.claim_id = l.claim_id and e.host_id = $2 and e.state = 'running'
returning e.claim_id, e.message_id, e.dead_letter_id, e.replay
