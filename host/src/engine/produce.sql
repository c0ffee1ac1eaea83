-- Produces a batch through the same functions as everybody else. $11 RFC 3339 deliver_after, else $12 delay in ms from now.
-- Called by engine::produce inside the caller's transaction.
select ordinal, id, duplicate, superseded
from {schema}.produce_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, (
    select array_agg(coalesce(d.deliver_after::timestamptz, clock_timestamp() + d.delay_ms * interval '1 ms') order by d.ordinal)
    from unnest($11::text[], $12::bigint[]) with ordinality as d (deliver_after, delay_ms, ordinal)
))
