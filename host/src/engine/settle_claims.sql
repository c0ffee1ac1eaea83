-- Takes messages out of their claims. $1 group, $2 host, $3 and $4 pairs of claim and message. Answers the claims that
-- still were ours with all these messages pending. Called by engine::settle after fence.sql.
select * from {schema}.settle_claims($1, $2, $3, $4)
