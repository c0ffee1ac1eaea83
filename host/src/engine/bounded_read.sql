-- Makes the planner keep to the order of the one index that each part of a read names: whatever its statistics say, or
-- lack, it then stops at the part's limit. Compiling such a statement would take longer than running it.
-- Called by engine::inspect at the start of a transaction that only reads.
set local jit = off;
set local enable_seqscan = off;
set local enable_bitmapscan = off;
set local enable_sort = off
