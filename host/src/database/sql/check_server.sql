-- Whether this server can be used. Called once by every process, before anything else.
-- Reads settings only, so it is safe at any time and behind any pooler.
select
    current_setting('server_version_num')::int4,
    current_setting('server_encoding'),
    pg_catalog.pg_is_in_recovery()
