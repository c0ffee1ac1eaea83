-- Hosts to recover. Called once a second by every host; the table has one row for each.
select id from {schema}.host where expires_at <= clock_timestamp() order by id
