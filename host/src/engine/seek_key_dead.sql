-- Marks the dead letters of key $2 of group $1 after position $3, whose messages come again. They stay. Called by
-- engine::seek_key; dead_letter_once.
update {schema}.dead_letter set replayed_at = clock_timestamp()
where group_id = $1 and message_key = $2 and message_id > $3 and redriven_at is null
