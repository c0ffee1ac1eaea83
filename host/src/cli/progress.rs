//! A progress bar for long work: on a terminal only, and never when `--quiet` is given.

use std::{io::IsTerminal, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Global;

/// How often the bar is drawn: often enough to look alive, rarely enough to cost nothing.
const DRAWS_PER_SECOND: u8 = 10;

const WITH_TOTAL: &str = "{wide_bar} {human_pos} of {human_len} {msg}, {per_sec}, {eta} left";
const WITHOUT_TOTAL: &str = "{spinner} {human_pos} {msg}, {per_sec}, {elapsed}";

/// Shows how many `what` of `total` are done, and how fast. Without a total, as from standard input, it only counts.
pub fn progress(global: &Global, total: Option<u64>, what: &str) -> ProgressBar {
    if global.quiet || global.output().is_json() || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND));
    let template = if total.is_some() { WITH_TOTAL } else { WITHOUT_TOTAL };
    let style = ProgressStyle::with_template(template).expect("both templates are well-formed: a test reads them");
    bar.set_style(style);
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(1000 / u64::from(DRAWS_PER_SECOND)));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_templates_are_well_formed() {
        for template in [WITH_TOTAL, WITHOUT_TOTAL] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
