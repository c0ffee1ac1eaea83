//! Files in the handlers folder that no group uses: mostly one whose name is not what streams.toml says.

use std::{collections::BTreeSet, path::Path};

/// Says once of each file that came while the host ran that nobody uses it. One that is there for a moment only (how
/// tools write files) is not told.
#[derive(Debug, Default)]
pub struct Strays {
    /// There at the last look; `None` before the first.
    last: Option<BTreeSet<String>>,
    /// There at the first look, or told.
    known: BTreeSet<String>,
}

impl Strays {
    /// Takes in what a slow look found, and answers what is to be told now. What was `used` once is no stranger.
    pub fn look(&mut self, found: BTreeSet<String>, used: &[String]) -> Vec<String> {
        let Some(last) = self.last.replace(found.clone()) else {
            self.known = found;
            return Vec::new();
        };
        self.known.extend(used.iter().cloned());
        self.known.retain(|name| found.contains(name));
        let news: Vec<String> = found.intersection(&last).filter(|name| !self.known.contains(*name)).cloned().collect();
        self.known.extend(news.iter().cloned());
        news
    }
}

/// The handler files of a folder that are not `used`. None where the folder cannot be read, which is told elsewhere.
pub fn unused(folder: &Path, used: &[String]) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".wasm") && !name.starts_with('.') && !used.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_came_and_stays_is_told_once() {
        let mut strays = Strays::default();
        let used = ["used.wasm".to_owned()];
        let mut look = |names: &[&str]| strays.look(names.iter().map(|name| (*name).to_owned()).collect(), &used);
        let nothing: [&str; 0] = [];
        assert_eq!(look(&["old.wasm"]), nothing);
        assert_eq!(look(&["old.wasm", "new.wasm"]), nothing, "it may be on its way elsewhere");
        assert_eq!(look(&["old.wasm", "new.wasm"]), ["new.wasm"]);
        assert_eq!(look(&["old.wasm", "new.wasm"]), nothing);
        assert_eq!(look(&["old.wasm"]), nothing);
        assert_eq!(look(&["new.wasm"]), nothing);
        assert_eq!(look(&["new.wasm"]), ["new.wasm"], "it was gone");
        assert_eq!(look(&["new.wasm", "used.wasm"]), nothing);
        let found = || ["new.wasm", "used.wasm"].map(str::to_owned).into();
        assert_eq!([strays.look(found(), &[]), strays.look(found(), &[])], [nothing; 2], "its group was taken out");
    }
}
