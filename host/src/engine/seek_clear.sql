-- Voids everything that a group ($1) has under way, and raises its epoch: claims, exceptions, key leases, gaps. A message
-- that was redriven is an open dead letter again, which holds its only sure copy.
-- Called by engine::seek after the locks; claim_group, exception and message_key_lease primary keys, cursor_gap_group.
with claims as (
    delete from {schema}.claim where group_id = $1 and id > 0 returning pending
),
exceptions as (
    delete from {schema}.exception where group_id = $1 returning state, dead_letter_id
),
leases as (
    delete from {schema}.message_key_lease where group_id = $1 and paused_at is null
),
paused as (                                     -- what an operator holds stays held
    update {schema}.message_key_lease set host_id = null, blocked_by = null, rests = false, buries = false, changed_at = clock_timestamp()
    where group_id = $1 and paused_at is not null
),
skipped as (
    delete from {schema}.skipped_versions where group_id = $1
),
gaps as (
    delete from {schema}.cursor_gap where group_id = $1
),
reopened as (
    update {schema}.dead_letter d set redriven_at = null
    from exceptions e where d.id = e.dead_letter_id and d.group_id = $1
    returning d.id
),
left_behind as (
    update {schema}.cursor set replay_upto = greatest(replay_upto, claimed) where group_id = $1 returning claimed
),
raised as (
    update {schema}.consumer_group set epoch = epoch + 1 where id = $1 returning epoch
)
select raised.epoch, left_behind.claimed,
    (select coalesce(sum(upper(r.ids) - lower(r.ids)), 0)::bigint from claims, unnest(claims.pending) as r (ids))
        + (select count(*) from exceptions where state = 'running') as in_flight,
    (select count(*) from exceptions where state = 'waiting') as retrying,
    (select count(*) from exceptions where state = 'delayed') as delayed,
    (select count(*) from exceptions where state = 'deferred') as deferred,
    (select count(*) from reopened) as reopened
from raised, left_behind
