//! Holds a guest to its group's memory and remembers what was refused and what grew. It never ends a guest itself: a
//! refused growth is an answer that a handler may deal with.

use std::sync::Arc;

use wasmtime::{Error, ResourceLimiter, Result};

use super::delivery::Delivery;

/// Most entries of one table. wasmtime's own default of 20,000 breaks debug builds of C#, Swift and large JavaScript
/// guests.
pub const TABLE_ELEMENTS_MAX: usize = 100_000;

/// Invariant: `allocated_bytes` is at most `memory_bytes_max`, over all memories of the instance together.
#[derive(Debug)]
pub struct Limiter {
    memory_bytes_max: usize,
    allocated_bytes: usize,
    /// What the last growth added, to be taken back when the system refuses what we allowed.
    last_growth_bytes: usize,
    delivery: Arc<Delivery>,
}

impl Limiter {
    pub fn new(memory_bytes_max: u64, delivery: Arc<Delivery>) -> Self {
        let memory_bytes_max = usize::try_from(memory_bytes_max).unwrap_or(usize::MAX);
        Self { memory_bytes_max, allocated_bytes: 0, last_growth_bytes: 0, delivery }
    }
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let growth = desired.saturating_sub(current);
        self.delivery.note_growth();
        if self.allocated_bytes.saturating_add(growth) > self.memory_bytes_max {
            self.delivery.note_refused_growth();
            return Ok(false);
        }
        self.allocated_bytes += growth;
        self.last_growth_bytes = growth;
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _error: Error) -> Result<()> {
        // The memory's own maximum or the system said no after we said yes.
        self.allocated_bytes -= std::mem::take(&mut self.last_growth_bytes);
        self.delivery.note_refused_growth();
        Ok(())
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        Ok(desired <= TABLE_ELEMENTS_MAX)
    }
}
