-- Notes an installed set of functions. Called under the declaration lock.
insert into {schema}.function_set (name, version, checksum) values ($1, $2, $3)
on conflict (name) do update set version = excluded.version, checksum = excluded.checksum
