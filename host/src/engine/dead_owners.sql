-- Which of these dead letters are there, and whose they are. Called by engine::dead; primary key.
select id, group_id from {schema}.dead_letter where id = any ($1)
