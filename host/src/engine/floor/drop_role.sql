-- Removes the role of the bench, with the functions that run as it and what it was granted.
drop owned by {schema} cascade;
drop role {schema}
