-- Produces a batch through the same functions as everybody else. $11 RFC 3339 deliver_after, else $12 delay in ms from now.
-- Called by engine::produce inside the caller's transaction. That may be one of a client's own, with any search_path, so
-- even what is of Postgres is named with its schema: nothing of somebody else can then match better and run with its rights.
select ordinal, id, duplicate, superseded
from {schema}.produce_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, (
    select pg_catalog.array_agg(coalesce(
        d.deliver_after::pg_catalog.timestamptz,
        pg_catalog.clock_timestamp() operator(pg_catalog.+) pg_catalog.make_interval(
            secs => d.delay_ms::pg_catalog.float8 operator(pg_catalog./) 1000::pg_catalog.float8)) order by d.ordinal)
    from rows from (pg_catalog.unnest($11::pg_catalog.text[]), pg_catalog.unnest($12::pg_catalog.int8[]))
        with ordinality as d (deliver_after, delay_ms, ordinal)
))
