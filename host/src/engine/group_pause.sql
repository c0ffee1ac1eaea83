-- Pauses a group. Twice changes nothing: it stays paused since the first time. Called by engine::pause; primary key.
with before as (
    select id, paused_at from {schema}.consumer_group where id = $1 for update
)
update {schema}.consumer_group g set paused_at = coalesce(g.paused_at, clock_timestamp()) from before b where g.id = b.id
returning b.paused_at is null as changed, to_char(g.paused_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as paused_at
