-- Which of these versions have lost to a newer one. $1 messages, $2 their keys. Called by engine::settle for compacted
-- messages that did not end well; compaction_head primary key.
select m.message_id
from unnest($1::bigint[], $2::text[]) as m (message_id, message_key)
join {schema}.compaction_head_{stream_id} h on h.message_key = m.message_key
where h.message_id <> m.message_id
