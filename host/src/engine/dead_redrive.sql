-- Delivers dead letters again, and tells of each what came of it. $1 their ids, $2 also where an ordered key has gone on.
-- Called by engine::dead; see functions/dead.sql.
select dead_letter_id, outcome from {schema}.redrive($1, $2)
