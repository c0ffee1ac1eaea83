-- One turn of one group on one host; the algorithm is in functions/claim.sql. Called by engine::claim.
select source, note, settled, frontier, claim_id, message_id, message_key, compaction_rank, routing_key, headers, content_type,
    payload, produced_at_ms, failures, redriven, replay
from {schema}.claim_{stream_id}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
