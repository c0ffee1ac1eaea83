-- A new group begins at a position. Called by engine::declare.
insert into {schema}.cursor (group_id, claimed) values ($1, greatest($2::bigint - 1, 0))
