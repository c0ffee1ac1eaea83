-- Keeps a component's bytes. Called under lock_components.sql; twice changes nothing.
insert into {schema}.component (digest, bytes) values ($1, $2) on conflict (digest) do nothing
