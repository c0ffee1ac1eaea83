-- Where group $1 has been sent and what is declared of it, and on how many lanes of key $2 a seek finds no hold of its own any
-- more (it holds them, but is undone then). Called by engine::seek_key under the group's lock.
select g.epoch, g.policy, {schema}.pause_key($1, $2) as let_go from {schema}.consumer_group g where g.id = $1
