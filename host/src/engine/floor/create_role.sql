-- The role that the bench's deliveries run SQL as, named as its schema, and the table they write to. The schema's drop leaves
-- the role, so drop_role.sql goes with it.
create role {schema} nologin;
grant {schema} to current_user;
grant usage on schema {schema} to {schema};
create table {schema}.effect (
    n       bigint generated always as identity primary key,
    note    bigint not null
);
grant insert on {schema}.effect to {schema}
