-- Keys whose compacted message has failed, before it is looked up whether that has lost: a turn that meets a newer version
-- takes the same locks (lease_fresh in functions/keys.sql). So either the settle sees the newer version, or the turn sees
-- what the settle leaves the key with. $1 group, $2 keys. Called by engine::settle; message_key_lease primary key, in order.
select from {schema}.message_key_lease where group_id = $1 and message_key = any ($2) order by message_key, lane for update
