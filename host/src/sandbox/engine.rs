//! The wasmtime engine and its settings. Each says what it buys; the figures are for a no-op Rust handler with a fresh
//! instance for every message, on 2 cores.

use anyhow::{Context, anyhow};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, WasmFeatures};

use super::{limiter::TABLE_ELEMENTS_MAX, ticker::TICK};

/// How many instances the pool holds. Each takes 4 GiB of address space (no memory until used), so where that is
/// scarce (containers, `ulimit -v`) the smaller one is tried, then none.
const POOL_SIZES: [u32; 2] = [1024, 128];

/// How many instances may exist at once without a pool: each is a memory of its own then.
const INSTANCES_WITHOUT_POOL: u32 = 256;

/// Memory that stays mapped when an instance is given back. Together with the page-map scan it makes tear-down cheap
/// (7 us a message); without the scan more than this is zeroed each time, which costs more than it saves.
const KEEP_RESIDENT_BYTES: usize = 64 * 1024;

/// Native stack of a guest, and how much of it wasm may use. The rest is for our imports: running over it would end the
/// process, so the gap is wide.
const STACK_BYTES: usize = 2 * 1024 * 1024;
const WASM_STACK_BYTES: usize = 512 * 1024;

/// An engine and what came of its settings.
pub struct Built {
    pub engine: Engine,
    /// How many instances may exist at once.
    pub instances_max: u32,
    /// One line for people: which settings are active.
    pub description: String,
}

/// Builds the engine with the largest pool that fits. `pool_max` is 0 to do without.
pub fn build(pool_max: u32) -> anyhow::Result<Built> {
    let mut refused = None;
    for size in POOL_SIZES.into_iter().filter(|size| *size <= pool_max) {
        let mut config = config();
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(size)));
        match Engine::new(&config) {
            Ok(engine) => return Ok(Built { engine, instances_max: size, description: describe_pool(size) }),
            Err(error) => refused = Some(format!("{error:#}")),
        }
    }
    let mut config = config();
    // Without a pool each memory reserves address space anew; small reservations work everywhere.
    config.memory_reservation(0).memory_guard_size(64 * 1024).memory_reservation_for_growth(1024 * 1024);
    let engine = Engine::new(&config).map_err(|error| anyhow!("{error:#}")).context("build the wasm engine")?;
    let why = refused.map_or_else(|| "switched off".to_owned(), |error| format!("no pool: {error}"));
    let description = format!("sandbox: on demand, slower ({why}), epoch tick {} ms", TICK.as_millis());
    Ok(Built { engine, instances_max: INSTANCES_WITHOUT_POOL, description })
}

fn config() -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(true)
        // We only call sync exports; without the bookkeeping for concurrent ones a message is 10 us cheaper.
        .concurrency_support(false)
        // A compile is one thread of ours; the threads of the runtime go on.
        .parallel_compilation(false)
        .max_wasm_stack(WASM_STACK_BYTES)
        .async_stack_size(STACK_BYTES)
        // Stacks are not zeroed in between: compiled wasm never reads what it has not written to its native stack.
        // Handlers come and go; registering each with the unwinder is quadratic on some systems, and wasmtime walks
        // frame pointers for its backtraces.
        .native_unwind_info(cfg!(windows));
    // What compilers emit by default, and no more: advisories cluster in the new features.
    let off = WasmFeatures::THREADS
        | WasmFeatures::GC
        | WasmFeatures::FUNCTION_REFERENCES
        | WasmFeatures::EXCEPTIONS
        | WasmFeatures::MEMORY64
        | WasmFeatures::CUSTOM_PAGE_SIZES
        | WasmFeatures::WIDE_ARITHMETIC
        | WasmFeatures::STACK_SWITCHING
        | WasmFeatures::CM_ASYNC;
    config.wasm_features(off, false);
    config
}

fn pool(size: u32) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(size)
        // A component from a preview-1 module has several core instances and tables, and one memory.
        .total_core_instances(size * 4)
        .total_memories(size)
        .total_tables(size * 4)
        .total_stacks(size)
        .table_elements(TABLE_ELEMENTS_MAX)
        .max_component_instance_size(10 << 20)
        .max_core_instance_size(10 << 20)
        .linear_memory_keep_resident(KEEP_RESIDENT_BYTES)
        .table_keep_resident(KEEP_RESIDENT_BYTES)
        .pagemap_scan(Enabled::Auto);
    pool
}

fn describe_pool(size: u32) -> String {
    let scan = if PoolingAllocationConfig::is_pagemap_scan_available() {
        "page-map scan active"
    } else {
        "page-map scan not available (needs Linux 6.7), slower"
    };
    format!(
        "sandbox: pool of {size}, {scan}, {} KiB kept resident, epoch tick {} ms",
        KEEP_RESIDENT_BYTES / 1024,
        TICK.as_millis()
    )
}
