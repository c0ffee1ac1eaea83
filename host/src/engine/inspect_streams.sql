-- Every stream with what the catalog knows of its log. Reads no log row. Called by engine::inspect.
select s.id, s.name, s.created_at, s.policy,
    coalesce(pg_catalog.pg_sequence_last_value(pg_catalog.to_regclass(pg_catalog.format('{schema_format}.%I', 'message_log_' || s.id || '_id'))), 0) as last_id,
    p.count as partitions, p.ahead as partitions_ahead, p.bytes, p.first_id
from {schema}.stream s
cross join lateral (
    select count(*) as count,
        count(*) filter (where lower_id > coalesce(pg_catalog.pg_sequence_last_value(pg_catalog.to_regclass(pg_catalog.format('{schema_format}.%I', 'message_log_' || s.id || '_id'))), 0)) as ahead,
        coalesce(sum(pg_catalog.pg_total_relation_size(pg_catalog.to_regclass(pg_catalog.format('{schema_format}.%I', table_name)))), 0)::bigint as bytes,
        min(lower_id) as first_id
    from {schema}.log_partition where stream_id = s.id and detached_at is null
) as p
order by s.name
