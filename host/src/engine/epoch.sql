-- The epoch a group works under now. Called by engine::epochs; primary key.
select epoch from {schema}.consumer_group where id = $1
