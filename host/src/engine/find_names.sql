-- Streams ($1 'stream') or groups ('group') by name: what people type on a command line is looked up here. One row for
-- each that is declared. Called by engine::names.
select id, name, null::integer as stream_id from {schema}.stream where $1 = 'stream'
union all
select id, name, stream_id from {schema}.consumer_group where $1 = 'group'
order by name
