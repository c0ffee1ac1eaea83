-- How many messages of key $2 of group $1 wait up to position $3, as far as $4. Called by engine::seek_key.
select count(*) from (
    select from {schema}.exception where group_id = $1 and message_key = $2 and message_id <= $3 and state <> 'running' limit $4
) as waiting
