-- A deployment is history and stays longer than the bytes of its component, of which only the last few are kept.

alter table {schema}.deployment drop constraint deployment_digest_fkey;
