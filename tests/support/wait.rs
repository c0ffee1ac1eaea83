//! Waiting for a state, never for a time.

use std::time::{Duration, Instant};

/// Returns when `predicate` holds. Panics after `limit`, a ceiling against hangs and no measure of speed.
pub async fn wait_for<F>(what: &str, limit: Duration, mut predicate: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let started = Instant::now();
    while !predicate().await {
        assert!(started.elapsed() < limit, "{what}: not within {} s", limit.as_secs());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
