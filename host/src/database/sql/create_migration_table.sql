-- Makes the bookkeeping of migrations. Called under the migration lock; the loser of a race finds it made.
create table if not exists {schema}.migration (
    version int4 constraint migration_pkey primary key,
    name text not null,
    -- sha256 of the file: an applied migration must never change.
    checksum text not null,
    applied_at timestamptz not null default clock_timestamp()
);
