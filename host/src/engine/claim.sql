-- One turn of one group on one host; the algorithm is in functions/claim.sql. Called by engine::claim.
select source, note, settled, ran, frontier, claim_id, message_id, message_key, compaction_rank, routing_key, headers, content_type,
    payload, produced_at_ms, failures, redriven, replay, concurrency, lane, skipped, gap_since
from {schema}.claim_{stream_id}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17,
    $18::text::{schema}.concurrency, $19, $20, $21, $22, $23, $24)
