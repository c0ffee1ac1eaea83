-- The floor of consume: a bare keyset read of the same log.
select id, message_key, payload, created_at::text from {schema}.message_log_{stream_id} where id > $1 order by id limit 250
