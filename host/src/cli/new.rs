//! `millstream new NAME`: writes a handler project that builds as it is. Never writes into a folder that is there.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{Global, UsageError, output::complain};

#[derive(Args, Debug)]
pub struct New {
    /// Name of the handler, and of the folder that is made here
    pub name: String,
    /// The language to write it in
    #[arg(long, value_enum, default_value_t = Language::Rust)]
    pub lang: Language,
    /// Folder of the `millstream-guest` crate [default: the one of this clone, else the released one]
    #[arg(long, value_name = "FOLDER")]
    pub sdk: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Language {
    Rust,
}

/// Longest name: with `.wasm` and a folder before it, it stays a file name everywhere.
const NAME_BYTES_MAX: usize = 64;

/// cargo takes none of these as the name of a package that depends on them, or that Rust can name.
const NAMES_TAKEN: [&str; 12] =
    ["alloc", "core", "crate", "fn", "mod", "proc-macro", "self", "serde", "std", "super", "test", "use"];

/// Path inside the project, and text with `{name}` and `{sdk}`.
const RUST: [(&str, &str); 5] = [
    ("Cargo.toml", include_str!("../../templates/handler-rust/Cargo.toml.in")),
    ("src/lib.rs", include_str!("../../templates/handler-rust/src/lib.rs.in")),
    ("Makefile", include_str!("../../templates/handler-rust/Makefile.in")),
    ("README.md", include_str!("../../templates/handler-rust/README.md.in")),
    (".gitignore", include_str!("../../templates/handler-rust/gitignore.in")),
];

/// The answer. Its field names are a contract.
#[derive(Serialize)]
struct Answer<'a> {
    name: &'a str,
    folder: &'a Path,
    files: Vec<&'static str>,
}

impl New {
    pub(super) fn run(&self, global: &Global) -> anyhow::Result<()> {
        check_name(&self.name)?;
        let templates = match self.lang {
            Language::Rust => RUST,
        };
        let folder = Path::new(&self.name);
        let sdk = self.sdk_dependency()?;
        fs::create_dir(folder).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => anyhow::anyhow!("{} is there already: choose another name", self.name),
            _ => anyhow::Error::new(error).context(format!("make the folder {}", self.name)),
        })?;
        for (file, template) in templates {
            let path = folder.join(file);
            let parent = path.parent().expect("a file of the project is inside its folder");
            fs::create_dir_all(parent)
                .and_then(|()| fs::write(&path, template.replace("{name}", &self.name).replace("{sdk}", &sdk)))
                .with_context(|| format!("write {}", path.display()))?;
        }
        let answer = Answer { name: &self.name, folder, files: templates.map(|(file, _)| file).to_vec() };
        global.output().one(&answer, next_steps)?;
        if !sdk.contains("path") {
            complain(
                "note: millstream-guest is not on crates.io yet; --sdk FOLDER names the guest-sdk folder of a clone",
            );
        }
        Ok(())
    }

    /// The line of Cargo.toml that says where the SDK is.
    fn sdk_dependency(&self) -> anyhow::Result<String> {
        let found = match &self.sdk {
            Some(folder) if is_sdk(folder) => {
                Some(folder.canonicalize().with_context(|| format!("find the folder {}", folder.display()))?)
            }
            Some(folder) => bail!(UsageError(format!("--sdk {}: there is no millstream-guest", folder.display()))),
            None => sdk_of_clone(),
        };
        Ok(match found {
            Some(folder) => {
                let folder = folder.to_str().context("name the folder of the SDK in Cargo.toml: it is not UTF-8")?;
                // A JSON string is a TOML string as well.
                format!("millstream-guest = {{ path = {} }}", serde_json::to_string(folder)?)
            }
            None => format!("millstream-guest = \"{}\"", env!("CARGO_PKG_VERSION")),
        })
    }
}

/// Who works in a clone of Millstream, or runs the program that was built there, gets that clone's SDK.
fn sdk_of_clone() -> Option<PathBuf> {
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    starts
        .iter()
        .flatten()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join("guest-sdk"))
        .find(|sdk| is_sdk(sdk))
}

fn is_sdk(folder: &Path) -> bool {
    fs::read_to_string(folder.join("Cargo.toml")).is_ok_and(|text| text.contains("name = \"millstream-guest\""))
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= NAME_BYTES_MAX
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_');
    let taken = NAMES_TAKEN.contains(&name.replace('_', "-").as_str())
        || name.replace('_', "-").starts_with("millstream-guest");
    if plain && !taken {
        return Ok(());
    }
    let reason = match taken {
        true => "the name is taken by Rust or by a crate the handler uses".to_owned(),
        false => {
            format!("allowed: a letter, then letters, digits, `-` and `_`, all lower-case, at most {NAME_BYTES_MAX}")
        }
    };
    bail!(UsageError(format!("{name:?} cannot be the name of a handler; {reason}")))
}

fn next_steps(answer: &Answer<'_>) -> String {
    let name = answer.name;
    format!(
        "{name}/ is written. Next:

  cd {name}
  make test     # its unit tests, without wasm
  make deploy   # builds {name}.wasm into ../handlers; HANDLERS=FOLDER names another folder

and in streams.toml, with a stream of its own to begin with:

  [streams.{name}]
  [groups.{name}]
  stream = \"{name}\"
  handler = \"{name}.wasm\"

then:

  echo '{{\"name\": \"Ada\"}}' | millstream produce {name}
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_packages_and_files() {
        for name in ["a", "order-email", "v2_orders", "tests"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        let long = "a".repeat(NAME_BYTES_MAX + 1);
        for name in ["", "-a", "1a", "A", "a/b", "..", "a b", "é", "self", "std", "serde", "millstream_guest", &long] {
            assert!(check_name(name).unwrap_err().is::<UsageError>(), "{name}");
        }
    }

    #[test]
    fn every_placeholder_is_filled() {
        for (file, template) in RUST {
            let filled = template.replace("{name}", "x").replace("{sdk}", "y");
            assert!(
                !filled.contains("{name}") && !filled.contains("{sdk}") && filled != template || file == ".gitignore"
            );
        }
    }
}
