-- Lets a paused group go on. Twice changes nothing. Called by engine::pause; primary key.
with before as (
    select id, paused_at from {schema}.consumer_group where id = $1 for update
)
update {schema}.consumer_group g set paused_at = null from before b where g.id = b.id
returning b.paused_at is not null as changed, null::text as paused_at
