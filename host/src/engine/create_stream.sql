-- What belongs to one stream. Run once, in the transaction that declares it, under the declaration lock.
-- Safe when run twice: it is not, and the lock and `stream_name_unique` see to it that it is not.

create sequence {schema}.message_log_{stream_id}_id as bigint cache 1;

-- The log: written once, never updated. Ids are positions: rising, unique, not dense.
create table {schema}.message_log_{stream_id} (
    id              bigint not null,
    created_at      timestamptz not null default clock_timestamp(),
    deliver_after   timestamptz,
    compaction_rank bigint,                     -- null: not compacted
    concurrency     {schema}.concurrency not null default 'parallel',
    lane            smallint not null default 0,
    message_key     text collate "C",
    routing_key     text,
    content_type    text,
    headers         jsonb,
    payload         bytea,                      -- null: a tombstone
    primary key (id)
) partition by range (id);

-- A key's versions: its history, and what thinning may remove. Costs nothing where nothing is compacted.
create index message_log_{stream_id}_versions on {schema}.message_log_{stream_id} (message_key, id) where compaction_rank is not null;

-- The winner among a key's versions: the highest (rank, id) that is committed. A tombstone's row outlives its message, so
-- that a late lower rank does not bring the key back.
create table {schema}.compaction_head_{stream_id} (
    message_key text collate "C" primary key,
    message_id  bigint not null,
    rank        bigint not null
);

-- Invariant: a row exists if and only if a message that gave this key is committed and younger than the stream's
-- idempotency_ttl (older rows are void and are swept).
create table {schema}.idempotency_key_{stream_id} (
    key         uuid primary key,
    message_id  bigint not null,
    fingerprint bytea not null,
    created_at  timestamptz not null default clock_timestamp()
);
create index idempotency_key_{stream_id}_age on {schema}.idempotency_key_{stream_id} (created_at);
