-- Prepares groups to run SQL as role $1. Called by engine::apply under the declaration lock; may be repeated.
select {schema}.allow_sql($1)
