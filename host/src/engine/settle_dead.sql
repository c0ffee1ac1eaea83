-- Messages the group gives up on, each with its own copy. $1 group, then arrays: message, attempts, class, error, digest,
-- dead letter it was redriven from, and of keyed ones concurrency and lane. A redriven one that dies again goes back to its row, and so does one that is
-- delivered again for another reason, or whose row was removed meanwhile: a group has one dead letter of a message, also
-- where two deliveries of it, a replay and one that was redriven, die together.
-- One whose row somebody removed from the log by hand ends too, without a payload, and says so.
-- Called by engine::settle and engine::recover after the messages were taken out.
with dead as (
    select * from unnest($2::bigint[], $3::integer[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::smallint[])
        as a (message_id, attempts, class, error, digest, dead_letter_id, concurrency, lane)
),
again as (
    update {schema}.dead_letter d
    set attempts = a.attempts, class = a.class, error = a.error, digest = a.digest, deaths = d.deaths + 1,
        died_at = clock_timestamp(), redriven_at = null, replayed_at = null
    from dead a where d.id = a.dead_letter_id and d.group_id = $1
    returning d.message_id
)
insert into {schema}.dead_letter as d (group_id, stream_id, message_id, attempts, class, error, digest,
    message_key, lane, concurrency, compaction_rank, routing_key, headers, content_type, payload, produced_at,
    deliver_after)
select distinct on (a.message_id) $1, {stream_id}, a.message_id, a.attempts, a.class,
    case when l.id is null then 'the message is no longer in the log; it failed with: ' else '' end || a.error, a.digest,
    l.message_key, a.lane, a.concurrency::{schema}.concurrency, l.compaction_rank, l.routing_key, l.headers, l.content_type, l.payload,
    coalesce(l.created_at, clock_timestamp()), l.deliver_after
from dead a left join {schema}.log_rows_{stream_id}($2::bigint[]) l on l.id = a.message_id
where not exists (select from again where again.message_id = a.message_id)
order by a.message_id, a.attempts desc
on conflict on constraint dead_letter_once do update
set attempts = excluded.attempts, class = excluded.class, error = excluded.error, digest = excluded.digest, deaths = d.deaths + 1,
    died_at = clock_timestamp(), redriven_at = null, replayed_at = null
