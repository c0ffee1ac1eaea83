-- The payload of one dead letter, only when somebody asked for it. Called by engine::dead; primary key.
select payload from {schema}.dead_letter where id = $1
