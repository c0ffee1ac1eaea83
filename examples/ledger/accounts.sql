-- What the ledger example works on: a role that may do no more than its handler needs, and accounts. Run it once, as a user
-- that may create roles; `millstream` is the user that the host connects as.
create role ledger nologin;
create table account (id text primary key, balance bigint not null check (balance >= 0));
grant usage on schema public to ledger;
grant select, update on account to ledger;
-- grant ledger to millstream;
