//! What is known about one handler file, and what to do after each look at it. Reads nothing, loads nothing, keeps no
//! clock: pure decisions.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How far apart two looks must agree before a file is taken, and how soon a second look follows a change. Long enough
/// for a compiler to write its output, short enough that a person does not notice.
pub const DEBOUNCE: Duration = Duration::from_millis(100);

/// How long a bad file must rest before it is reported. Until then it may be half of a good one: copying over a slow
/// link pauses for hundreds of milliseconds.
const REST: Duration = Duration::from_secs(1);

/// What a look found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Missing,
    /// It cannot be read; why, and what to do.
    Unreadable(String),
    File {
        digest: Arc<str>,
        /// Whether it is a whole wasm file as far as its sections tell; other files count as whole.
        whole: bool,
    },
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Nothing,
    /// Look again after [`DEBOUNCE`], whatever happens.
    LookAgain,
    /// The file is whole and at rest: load it, and tell with [`Candidate::loaded`] or [`Candidate::refused`].
    Load,
    /// It is gone. Said once.
    ReportMissing,
    /// It is bad and at rest. Said once for each content.
    Report(String),
}

/// One file, over all looks.
#[derive(Debug, Default)]
pub struct Candidate {
    /// What the last look found, and when that was first found.
    last: Option<(Seen, Instant)>,
    /// Digest of what serves.
    serving: Option<Arc<str>>,
    /// Digest that is being loaded.
    loading: Option<Arc<str>>,
    /// Digest of a file that could not be loaded, and why.
    refused: Option<(Arc<str>, String)>,
    /// What was reported last, so that it is said once.
    reported: Option<Seen>,
}

impl Candidate {
    /// Takes in what a look found at `now`.
    pub fn look(&mut self, seen: Seen, now: Instant) -> Decision {
        let rested = match &self.last {
            Some((last, since)) if *last == seen => now.duration_since(*since),
            _ => {
                self.last = Some((seen.clone(), now));
                Duration::ZERO
            }
        };
        match seen {
            Seen::Missing if self.reported.as_ref() == Some(&Seen::Missing) => Decision::Nothing,
            // A save by delete and rename has a moment without a file.
            Seen::Missing if rested < DEBOUNCE => Decision::LookAgain,
            Seen::Missing => {
                self.reported = Some(Seen::Missing);
                Decision::ReportMissing
            }
            Seen::Unreadable(ref why) => {
                let why = why.clone();
                self.report_at_rest(seen, why, rested)
            }
            Seen::File { ref digest, whole } => {
                if self.serving.as_ref() == Some(digest) {
                    self.reported = None;
                    Decision::Nothing
                } else if self.loading.is_some() {
                    // One load at a time; the end of it is followed by a look.
                    Decision::Nothing
                } else if let Some((refused, why)) = &self.refused
                    && refused == digest
                {
                    let why = why.clone();
                    self.report_at_rest(seen, why, rested)
                } else if rested < DEBOUNCE || (!whole && rested < REST) {
                    Decision::LookAgain
                } else {
                    self.loading = Some(digest.clone());
                    Decision::Load
                }
            }
        }
    }

    fn report_at_rest(&mut self, seen: Seen, why: String, rested: Duration) -> Decision {
        if self.reported.as_ref() == Some(&seen) {
            Decision::Nothing
        } else if rested < REST {
            Decision::LookAgain
        } else {
            self.reported = Some(seen);
            Decision::Report(why)
        }
    }

    pub fn is_serving(&self) -> bool {
        self.serving.is_some()
    }

    pub fn serves(&self, digest: &str) -> bool {
        self.serving.as_deref() == Some(digest)
    }

    /// What was to be loaded serves now. Look again: it may have changed meanwhile.
    pub fn loaded(&mut self) {
        self.serving = self.loading.take();
        self.refused = None;
        self.reported = None;
    }

    /// What was to be loaded cannot be. Look again: it is reported when it is at rest.
    pub fn refused(&mut self, why: String) {
        self.refused = self.loading.take().map(|digest| (digest, why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(digest: &str) -> Seen {
        Seen::File { digest: digest.into(), whole: true }
    }

    fn half(digest: &str) -> Seen {
        Seen::File { digest: digest.into(), whole: false }
    }

    /// Looks at these times (milliseconds) and compares the decisions.
    fn check(candidate: &mut Candidate, start: Instant, looks: &[(u64, Seen, Decision)]) {
        for (at_ms, seen, expected) in looks {
            let decision = candidate.look(seen.clone(), start + Duration::from_millis(*at_ms));
            assert_eq!(decision, *expected, "at {at_ms} ms, {seen:?}");
        }
    }

    #[test]
    fn a_file_is_taken_when_two_looks_agree() {
        let (mut candidate, start) = (Candidate::default(), Instant::now());
        check(
            &mut candidate,
            start,
            &[
                (0, file("a"), Decision::LookAgain),
                (99, file("b"), Decision::LookAgain),
                (150, file("b"), Decision::LookAgain),
                (199, file("b"), Decision::Load),
                (210, file("b"), Decision::Nothing),
            ],
        );
        candidate.loaded();
        check(&mut candidate, start, &[(9_000, file("b"), Decision::Nothing), (9_001, file("c"), Decision::LookAgain)]);
    }

    #[test]
    fn a_file_in_chunks_is_neither_taken_nor_reported_before_it_is_whole() {
        let (mut candidate, start) = (Candidate::default(), Instant::now());
        check(
            &mut candidate,
            start,
            &[
                (0, half("a"), Decision::LookAgain),
                (290, half("a"), Decision::LookAgain),
                (300, half("ab"), Decision::LookAgain),
                (600, file("abc"), Decision::LookAgain),
                (700, file("abc"), Decision::Load),
            ],
        );
    }

    #[test]
    fn a_refused_file_is_reported_once_and_only_at_rest() {
        let (mut candidate, start) = (Candidate::default(), Instant::now());
        let why = || Decision::Report("no".into());
        check(&mut candidate, start, &[(0, file("a"), Decision::LookAgain), (100, file("a"), Decision::Load)]);
        candidate.refused("no".into());
        check(
            &mut candidate,
            start,
            &[
                (200, file("a"), Decision::LookAgain),
                (1_000, file("a"), why()),
                (1_100, file("a"), Decision::Nothing),
                (9_000, file("a"), Decision::Nothing),
                (9_100, file("b"), Decision::LookAgain),
                (9_200, file("b"), Decision::Load),
            ],
        );
    }

    #[test]
    fn a_half_file_at_rest_is_loaded_to_hear_what_is_wrong_with_it() {
        let (mut candidate, start) = (Candidate::default(), Instant::now());
        check(&mut candidate, start, &[(0, half("a"), Decision::LookAgain), (1_000, half("a"), Decision::Load)]);
    }

    #[test]
    fn a_deleted_file_is_reported_once_and_its_return_is_no_reload() {
        let (mut candidate, start) = (Candidate::default(), Instant::now());
        check(&mut candidate, start, &[(0, file("a"), Decision::LookAgain), (100, file("a"), Decision::Load)]);
        candidate.loaded();
        check(
            &mut candidate,
            start,
            &[
                (200, Seen::Missing, Decision::LookAgain),
                (300, Seen::Missing, Decision::ReportMissing),
                (400, Seen::Missing, Decision::Nothing),
                (500, file("a"), Decision::Nothing),
                (600, Seen::Missing, Decision::LookAgain),
                (700, Seen::Missing, Decision::ReportMissing),
            ],
        );
    }
}
