-- Deletes at most $1 components that neither are among the last 10 deployments of a group nor serve on a host, as its last
-- heartbeat said. Called under the step's lock, which recording a deployment takes too: what is recorded is not missed.
delete from {schema}.component
where digest in (
    select digest from {schema}.component
    except
    select digest
    from (select digest, row_number() over (partition by group_id order by id desc) as age from {schema}.deployment) as d
    where age <= 10
    except
    select handler.value ->> 'digest'
    from {schema}.host h, jsonb_each(case when jsonb_typeof(h.stats -> 'handlers') = 'object' then h.stats -> 'handlers' else '{}' end) as handler
    limit $1)
