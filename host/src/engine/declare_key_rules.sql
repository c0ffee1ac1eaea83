-- A stream's key rules, in place of those before. $1 stream, then arrays: LIKE pattern, concurrency, compaction, shards. Where
-- patterns or shards change, messages keep the lanes they have: how many that may be is kept. Called by engine::declare under
-- the declaration lock.
with before as (
    select array_agg(pattern order by ordinal) as patterns, array_agg(shards order by ordinal) as shards, max(shards) as most
    from {schema}.key_rule where stream_id = $1
),
past as (
    update {schema}.stream set past_shards = greatest(past_shards, most)
    from before where id = $1 and (patterns, shards) is distinct from ($2::text[], $5::smallint[])
),
gone as (
    delete from {schema}.key_rule where stream_id = $1 and ordinal > coalesce(cardinality($2::text[]), 0)
)
insert into {schema}.key_rule (stream_id, ordinal, pattern, concurrency, compaction, shards)
select $1, ordinal, pattern, concurrency::{schema}.concurrency, compaction, shards
from unnest($2::text[], $3::text[], $4::boolean[], $5::smallint[]) with ordinality as r (pattern, concurrency, compaction, shards, ordinal)
on conflict (stream_id, ordinal) do update set pattern = excluded.pattern, concurrency = excluded.concurrency,
    compaction = excluded.compaction, shards = excluded.shards
