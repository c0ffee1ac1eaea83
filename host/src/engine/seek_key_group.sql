-- Where group $1 has been sent, what is declared of it, and on how many lanes key $2 has not been held since $3. Called by
-- engine::seek_key under the group's lock.
select g.epoch, g.policy, {schema}.lanes_let_go($1, $2, $3::text::timestamptz) as let_go
from {schema}.consumer_group g where g.id = $1
