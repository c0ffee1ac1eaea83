-- A new group begins at the first message: the cursor stands before every id. Called by engine::declare.
insert into {schema}.cursor (group_id, claimed) values ($1, 0)
