-- Who holds key $2 of group $1 to run messages of it. Those without a mode do not ask for the key, see seek_key_running.sql.
-- Called by engine::seek_key; message_key_lease primary key, exception_host.
select coalesce(string_agg(distinct h.name, ', '), '') as hosts, count(*) as count
from (
    select host_id from {schema}.message_key_lease where group_id = $1 and message_key = $2 and host_id is not null
    union all
    select h.id from {schema}.host h, lateral (
        select from {schema}.exception
        where host_id = h.id and group_id = $1 and state = 'running' and message_key = $2 and concurrency <> 'parallel' limit 1
    ) as e
) as busy
left join {schema}.host h on h.id = busy.host_id
