-- The floor of produce: the same rows, without anything around them.
insert into {schema}.bare (id, payload) select nextval('{schema_text}.bare_id'), p from unnest($1::bytea[]) as p
