-- Makes the schema. Called under the migration lock by a start that did not find it.
create schema {schema};
