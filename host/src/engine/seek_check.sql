-- What a point is judged by before a seek: the last id drawn, and whether a time ($1) is still to come.
-- Called by engine::seek.
select coalesce(pg_sequence_last_value('{schema_text}.message_log_{stream_id}_id'::regclass), 0) as last_id,
    coalesce($1::timestamptz > clock_timestamp(), false) as is_future
