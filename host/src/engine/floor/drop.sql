-- Removes the bench's schema with everything in it.
drop schema {schema} cascade
