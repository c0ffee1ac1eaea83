-- Waits for turns and settles of a host that are still under way, before it is looked whether it holds anything: what they
-- bring must not outlive its row, since recovery would never find it. Called by engine::lease; primary key.
select from {schema}.host where id = $1 for update
