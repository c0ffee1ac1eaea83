//! A clock that runs on while the machine sleeps, as the database's does.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since some moment in the past. Only differences mean something.
pub fn now() -> Duration {
    // Linux counts suspended time in this clock only; macOS does in its monotonic one.
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let clock = ClockId::Monotonic;
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).expect("no such clock starts below zero");
    let nanoseconds = u32::try_from(time.tv_nsec).expect("less than a second");
    Duration::new(seconds, nanoseconds)
}
