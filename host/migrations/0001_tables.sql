-- The tables that all streams share. What belongs to one stream is made by host/src/engine/create_stream.sql.
--
-- Advisory locks, all of the two-number form, so that they show in pg_locks with objsubid = 2:
--   ({lock_class},     stream)  producer lock: held shared from before an id is drawn until the end of the transaction.
--                               The claim's gap rule rests on it.
--   ({lock_class} + 1, group)   claims of one group, one at a time.
--   ({lock_class} + 2, stream)  extending or dropping partitions of one stream.
--   ({lock_class} + 3, 0)       migrations and declarations.
--   ({lock_class} + 4, step)    one maintenance step, on one host at a time.
--   ({lock_class} + 5, stream)  ordered keys: shared by whoever locks single keys, exclusive by who has too many of them.
-- Of the one-number form: a hash of stream, ordered key and lane, held by who produces to it. See lock_ordered_keys in
-- functions/shared.sql.

create type {schema}.concurrency as enum ('parallel', 'exclusive', 'ordered');

create table {schema}.stream (
    id                        integer generated always as identity primary key,
    name                      text collate "C" not null,
    retention_ms              bigint,           -- null: forever
    idempotency_ttl_ms        bigint not null,
    max_payload_bytes         bigint not null,
    partition_rows            bigint not null,
    dead_letter_retention_ms  bigint not null,
    tombstone_retention_ms    bigint not null,
    max_lag_ms                bigint,           -- null: a lagging group is never passed
    policy                    jsonb not null,   -- the whole declaration, as last applied
    past_shards               smallint not null default 1, -- most of any key rule that changed: its messages keep their lanes
    created_at                timestamptz not null default clock_timestamp(),
    constraint stream_name_unique unique (name),
    constraint stream_name_length check (octet_length(name) between 1 and 200)
);

-- A stream's key policy, each rule with what it inherits: the first whose pattern matches a key decides what its messages
-- leave open. None: parallel, not compacted. Written by engine::declare from `policy`.
create table {schema}.key_rule (
    stream_id   integer not null references {schema}.stream (id),
    ordinal     integer not null,
    pattern     text collate "C" not null,      -- for LIKE
    concurrency {schema}.concurrency not null,
    compaction  boolean not null,
    shards      smallint not null,              -- lanes a key of it is spread over
    primary key (stream_id, ordinal)
);

-- Which partitions a stream's log has. Written in the transaction that attaches or detaches one, so it is never wrong.
create table {schema}.log_partition (
    stream_id   integer not null references {schema}.stream (id),
    lower_id    bigint not null,
    upper_id    bigint not null,                -- exclusive
    table_name  text not null,
    created_at  timestamptz not null default clock_timestamp(),
    detached_at timestamptz,
    passed_at   timestamptz,                    -- compacted streams: first seen behind every group
    thinned_at  timestamptz,                    -- compacted streams: when nothing was left to thin
    primary key (stream_id, lower_id),
    constraint log_partition_not_empty check (lower_id < upper_id)
);

create table {schema}.consumer_group (
    id          integer generated always as identity primary key,
    name        text collate "C" not null,
    stream_id   integer not null references {schema}.stream (id),
    handler     text not null,
    policy      jsonb not null,                 -- the whole declaration, as last applied
    epoch       bigint not null default 0,      -- raised by seek: work of an older epoch is void
    paused_at   timestamptz,
    created_at  timestamptz not null default clock_timestamp(),
    constraint consumer_group_name_unique unique (name),
    constraint consumer_group_name_length check (octet_length(name) between 1 and 200)
);

-- One row per running process. Invariant: a row whose `expires_at` has passed is never renewed, only deleted by
-- recovery; the process takes a new identity.
create table {schema}.host (
    id            bigint generated always as identity primary key,
    name          text not null,
    sessions      text not null default '',     -- what stands in the application_name of its database sessions
    version       text not null,
    started_at    timestamptz not null default clock_timestamp(),
    heartbeat_at  timestamptz not null default clock_timestamp(),
    expires_at    timestamptz not null,
    stats         jsonb not null default '{}'   -- counters since start, as of the last heartbeat
);

-- How far a group has claimed its stream: every visible message up to `claimed` is settled, in a claim, an exception,
-- or a dead letter, and everything not yet visible below it lies in a cursor_gap. Invariant: one row per group, inserted
-- with it. A turn changes it, and while somebody's snapshot is old no version of it can be removed. So a turn finds the
-- newest at the end of the key, changes it in place (by ctid), and needs no key on the group alone, in which every change
-- would be compared with all versions: 20 us a change, instead of 750 after 30,000 of them.
create table {schema}.cursor (
    group_id     integer not null references {schema}.consumer_group (id),
    claimed      bigint not null,
    begins_after bigint not null,               -- where it was put last: at its creation, by a seek, by max_lag
    replay_upto  bigint not null default 0,     -- the highest `claimed` a seek has left: up to here deliveries are replays
    gap_floor    bigint not null default 0,     -- no gap of the group has a lower id: dead ones need not be walked through
    primary key (group_id, claimed)
);

-- Ids the cursor has stepped over while a producer might still commit them.
create table {schema}.cursor_gap (
    id          bigint generated always as identity primary key,
    group_id    integer not null,
    missing     int8multirange not null,
    holders     text[] not null,                -- virtual transactions that held the producer lock then
    pids        integer[] not null,             -- their processes, for people
    opened_at   timestamptz not null default clock_timestamp()
);
create index cursor_gap_group on {schema}.cursor_gap (group_id, id);

create sequence {schema}.claim_id;

-- Hot tables name their group without a foreign key: the check would lock the group's row in every turn.
--
-- They are empty whenever nothing waits, and the planner that has seen them so thinks any walk through them cheap. How a
-- turn looks up some rows among many all the same stands in functions/turn.sql.

-- One row per claimed batch. Invariant: `pending` is what the host has not yet settled; ids leave it exactly once, and
-- a claim id is never used twice. A turn settles by primary key alone; through an index on the group it would walk through
-- every dead row that an old snapshot keeps. So that one has a condition which every row meets, and only who wants all
-- claims of a group names it: `id > 0`.
create table {schema}.claim (
    id          bigint primary key,             -- from claim_id
    group_id    integer not null,
    host_id     bigint not null references {schema}.host (id),
    pending     int8multirange not null,
    claimed_at  timestamptz not null default clock_timestamp()
) with (fillfactor = 70);
create index claim_group on {schema}.claim (group_id) where id > 0;

-- Who has a key, or what it waits for. With `shards`, each lane of a key is a key of its own here.
--   leased   host_id      that host runs the key's messages, one at a time, and takes further ones into its own queue
--   blocked  blocked_by   ordered: this message waits for a retry, for its time, or as a dead letter; the key with it
--   paused   paused_at    an operator holds it; a host that has it finishes what it took
--   resting  rests        on_dead_letter = "rest": its messages die until an operator releases it
--   ready    none of them any host may take it, with the messages deferred behind it
-- No row: the key is free. Invariant: a key with a deferred message has a row, so no message waits for nobody. Rows come
-- and go under the group's advisory lock only; a settle may turn `leased` into `blocked` or `resting`.
create table {schema}.message_key_lease (
    group_id    integer not null,
    message_key text collate "C" not null,
    lane        smallint not null default 0,
    host_id     bigint,
    blocked_by  bigint,
    paused_at   timestamptz,                    -- it is held since then
    seek_began  timestamptz,                    -- by the seek of it that held it then; null: by an operator
    rests       boolean not null default false,
    buries      boolean not null default false, -- it rests, and something may be deferred behind it
    changed_at  timestamptz not null default clock_timestamp(),
    primary key (group_id, message_key, lane),
    constraint message_key_lease_one_state check (host_id is null or (blocked_by is null and not rests)),
    constraint message_key_lease_buries check (rests or not buries),
    constraint message_key_lease_seek check (seek_began is null or paused_at is not null)
) with (fillfactor = 70);
create index message_key_lease_host on {schema}.message_key_lease (host_id, group_id) where host_id is not null;
create index message_key_lease_ready on {schema}.message_key_lease (group_id)
    where host_id is null and blocked_by is null and paused_at is null and (not rests or buries);
create index message_key_lease_blocked on {schema}.message_key_lease (group_id) where blocked_by is not null;

-- Versions of a key that a group passed over since its last delivery of the key: `skipped` of the next one.
create table {schema}.skipped_versions (
    group_id    integer not null,
    message_key text collate "C" not null,
    versions    bigint not null,
    primary key (group_id, message_key)
);

create type {schema}.exception_state as enum (
    'waiting',   -- for its retry; leaves when due, to running
    'delayed',   -- until deliver_after; leaves when due, to running
    'deferred',  -- behind its key; leaves when the key frees, to running. With due_at: not before that
    'running'    -- on host_id under claim_id; leaves by its settle, or by recovery to waiting or deferred
);

-- Messages that need attention of their own. A message that succeeds at its first delivery never has a row here.
create table {schema}.exception (
    group_id        integer not null,
    message_id      bigint not null,
    state           {schema}.exception_state not null,
    due_at          timestamptz,
    failures        integer not null default 0, -- counted failures; the next delivery is attempt failures + 1
    host_id         bigint,                     -- a live host's, since every turn locks its row; recovery leaves none behind
    claim_id        bigint,                     -- fencing token of the running delivery
    message_key     text collate "C",
    lane            smallint not null default 0,
    concurrency     {schema}.concurrency not null default 'parallel',  -- as the group treats it
    compaction_rank bigint,                     -- null: not compacted; which rank it has is for the log to say
    skipped         bigint not null default 0,  -- versions passed over before this one
    dead_letter_id  bigint,                     -- redriven: the dead letter that holds the message's copy
    replay          boolean not null default false,
    last_class      text,
    last_error      text,
    last_digest     text,
    failed_at       timestamptz,
    primary key (group_id, message_id),
    constraint exception_due check (case state when 'running' then due_at is null when 'deferred' then true else due_at is not null end),
    constraint exception_owner check ((state = 'running') = (host_id is not null)),
    constraint exception_token check ((state = 'running') = (claim_id is not null))
);
create index exception_due on {schema}.exception (group_id, due_at) where state in ('waiting', 'delayed');
create index exception_host on {schema}.exception (host_id, group_id) where state = 'running';
create index exception_deferred on {schema}.exception (group_id, message_key, lane, message_id) where state = 'deferred';

-- Messages a group gave up on, each with its own copy, so that retention can go on.
-- A redriven one keeps its row, with `redriven_at`, until the new delivery ends. One with `replayed_at` stays for people.
create table {schema}.dead_letter (
    id              bigint generated always as identity primary key,
    group_id        integer not null references {schema}.consumer_group (id),
    stream_id       integer not null references {schema}.stream (id),
    message_id      bigint not null,
    attempts        integer not null,
    class           text not null,
    error           text not null,
    digest          text,                       -- of the component that failed last
    deaths          integer not null default 1,
    died_at         timestamptz not null default clock_timestamp(),
    redriven_at     timestamptz,
    replayed_at     timestamptz,                -- since it died its group was sent back to the message, which comes again
    message_key     text collate "C",
    lane            smallint not null default 0,
    concurrency     {schema}.concurrency not null,  -- as the group treats it
    compaction_rank bigint,
    routing_key     text,
    headers         jsonb,
    content_type    text,
    payload         bytea,
    produced_at     timestamptz not null,
    deliver_after   timestamptz,                -- it may die before, with its key; not even a redrive delivers it earlier
    constraint dead_letter_once unique (group_id, message_id)
);
create index dead_letter_open on {schema}.dead_letter (group_id, id) where redriven_at is null;
create index dead_letter_key on {schema}.dead_letter (group_id, message_key, message_id) where redriven_at is null and concurrency = 'ordered';
create index dead_letter_age on {schema}.dead_letter (stream_id, died_at);

create table {schema}.component (
    digest      text primary key,               -- sha256 of the file, lower-case hex
    bytes       bytea not null,
    created_at  timestamptz not null default clock_timestamp()
);
alter table {schema}.component alter column bytes set storage external;  -- wasm hardly shrinks; do not spend the CPU

create table {schema}.deployment (
    id          bigint generated always as identity primary key,
    group_id    integer not null references {schema}.consumer_group (id),
    host_id     bigint not null,                -- outlives its host row
    digest      text not null,                  -- outlives the bytes of its component, of which the last few are kept
    replaced    text,
    deployed_at timestamptz not null default clock_timestamp()
);
create index deployment_group on {schema}.deployment (group_id, id);

-- Which version of the generated functions is installed: `shared`, and one row per stream.
create table {schema}.function_set (
    name        text primary key,
    version     integer not null,
    checksum    text not null
);
