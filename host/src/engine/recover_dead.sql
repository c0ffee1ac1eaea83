-- Takes out exceptions that are about to be dead-lettered. $1 group, $2 messages. Called by engine::recover.
delete from {schema}.exception where group_id = $1 and message_id = any ($2) and state in ('waiting', 'deferred')
