-- A bare table with the columns of a log, for the floors of `millstream bench`. Dropped with the bench's schema.
create sequence {schema}.bare_id as bigint;
create table {schema}.bare (
    id              bigint primary key,
    created_at      timestamptz not null default clock_timestamp(),
    message_key     text,
    payload         bytea
)
