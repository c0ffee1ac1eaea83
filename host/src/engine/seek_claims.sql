-- Waits until no settle is at a group's claims any more ($1). A settle that was quicker has then committed, and what it
-- scheduled again is seen by the statement that clears; a later one waits, and finds its claim gone. In the order in
-- which settles lock. Called by engine::seek under the group's lock; claim_group.
select count(*) from (select from {schema}.claim where group_id = $1 and id > 0 order by id for update) as held
