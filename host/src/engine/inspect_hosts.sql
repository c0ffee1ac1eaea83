-- Every host that has a row: the living, and the dead that are not yet recovered. Called by engine::inspect.
select id, name, version, to_char(started_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') as started_at,
    (extract(epoch from clock_timestamp() - heartbeat_at) * 1000)::bigint as heartbeat_age_ms,
    (extract(epoch from expires_at - clock_timestamp()) * 1000)::bigint as lease_left_ms, stats
from {schema}.host
order by id
