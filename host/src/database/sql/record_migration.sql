-- Remembers an applied migration, in its own transaction. The primary key makes a second one fail.
insert into {schema}.migration (version, name, checksum) values ($1, $2, $3)
