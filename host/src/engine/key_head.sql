-- The winner among the versions of key $1. Called by engine::keys; compaction_head primary key.
select message_id, rank from {schema}.compaction_head_{stream_id} where message_key = $1
