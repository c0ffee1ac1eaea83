-- Marks the dead letters of group $1 whose messages come again ($2). They stay. Called by engine::seek_key; dead_letter_once.
update {schema}.dead_letter set replayed_at = clock_timestamp()
where group_id = $1 and message_id = any ($2) and redriven_at is null
