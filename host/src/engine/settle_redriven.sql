-- Dead letters whose redriven message is done. $1 group, $2 dead letters. Called by engine::settle.
delete from {schema}.dead_letter where group_id = $1 and id = any ($2) and redriven_at is not null
