//! From the bytes of a file to the bytes of a component of our world, or to a line that says what else it is. Compiles
//! nothing.

use std::{borrow::Cow, collections::BTreeSet};

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wit_component::{ComponentEncoder, DecodedWasm};

use super::{
    file::{Form, form},
    imports::OFFERED,
    load_error::LoadError,
};

/// The package of the contract and the version we speak. Versions grow additively: the same minor is the same contract.
const PACKAGE: &str = "millstream:handler";
const PACKAGE_VERSION: &str = "0.1.0";

/// How to build a handler, for every error that ends in "build it so".
const BUILD: &str = "build it with `cargo build --release --target wasm32-unknown-unknown` from a crate with \
                     `crate-type = [\"cdylib\"]` and `#[millstream_guest::handler]`";

/// The component in these bytes: itself, or made from a core module with WIT metadata.
pub fn component(bytes: &[u8]) -> Result<Cow<'_, [u8]>, LoadError> {
    let component = match form(bytes) {
        Form::Component => Cow::Borrowed(bytes),
        Form::ModuleWithMetadata => Cow::Owned(encode(bytes)?),
        other => return Err(refusal(other, bytes)),
    };
    check_world(&component)?;
    Ok(component)
}

fn refusal(form: Form, bytes: &[u8]) -> LoadError {
    LoadError::new(match form {
        Form::ModuleWithout => format!(
            "is a core wasm module without WIT metadata, so it does not say how to call it: did you forget \
             #[millstream_guest::handler]? Otherwise {BUILD}"
        ),
        Form::Truncated => {
            format!("is a wasm file cut off in the middle ({} bytes): copy it again", bytes.len())
        }
        Form::UnknownVersion => {
            format!("is wasm of an unknown version ({:02x?}): {BUILD}", bytes.get(4..8).unwrap_or_default())
        }
        Form::Text => {
            "is WebAssembly text, not a binary: turn it into one with `wasm-tools parse in.wat -o out.wasm`".into()
        }
        Form::Precompiled => "is a precompiled .cwasm, which is native code and is never loaded from a file: \
                              put the .wasm it was made from here, the host compiles and caches it"
            .into(),
        Form::Empty => "is empty: copy it again".into(),
        Form::Other | Form::Component | Form::ModuleWithMetadata => {
            format!("is not WebAssembly (it starts with {:02x?}): {BUILD}", &bytes[..bytes.len().min(4)])
        }
    })
}

/// Wraps a core module. The adapter is added only where the module asks for it.
fn encode(bytes: &[u8]) -> Result<Vec<u8>, LoadError> {
    let needs_adapter = bytes
        .windows(WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME.len())
        .any(|window| window == WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME.as_bytes());
    let encoded = ComponentEncoder::default().module(bytes).and_then(|encoder| {
        let encoder = if needs_adapter {
            encoder.adapter(WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER)?
        } else {
            encoder
        };
        encoder.validate(true).encode()
    });
    encoded.map_err(|error| {
        let error = format!("{error:#}");
        let hint = if error.contains("export") && error.contains("handle") {
            "did you forget #[millstream_guest::handler]?"
        } else if error.contains("import") {
            "the module calls a function nobody provides: build it for wasm32-wasip1, or drop the dependency that needs it"
        } else {
            "rebuild it with the millstream-guest of this host's version"
        };
        LoadError::new(format!("is a core module that cannot become a component ({error}): {hint}"))
    })
}

/// Compares names only, before the long compile; the types are checked when it is linked.
fn check_world(component: &[u8]) -> Result<(), LoadError> {
    let decoded = wit_component::decode(component)
        .map_err(|error| LoadError::new(format!("is not a valid component ({error:#}): build it again")))?;
    let DecodedWasm::Component(resolve, world) = &decoded else {
        return Err(LoadError::new(format!("is a WIT package, not a handler: {BUILD}")));
    };
    let world = &resolve.worlds[*world];
    let imports: Vec<String> = world.imports.keys().map(|key| resolve.name_world_key(key)).collect();
    let exports: Vec<String> = world.exports.keys().map(|key| resolve.name_world_key(key)).collect();
    check_package_version(imports.iter().chain(&exports))?;
    if !exports.iter().any(|export| export == "handle") {
        return Err(wrong_export(&exports));
    }
    // Names without a slash are the types of the world itself; the linker checks them.
    let interfaces = imports.iter().filter(|import| import.contains('/'));
    let unknown: Vec<&String> = interfaces.filter(|import| !is_offered(import)).collect();
    if unknown.is_empty() { Ok(()) } else { Err(unknown_imports(&unknown)) }
}

fn check_package_version<'a>(names: impl Iterator<Item = &'a String>) -> Result<(), LoadError> {
    let ours = minor(PACKAGE_VERSION);
    let other: BTreeSet<&str> = names
        .filter(|name| name.starts_with(PACKAGE) && name[PACKAGE.len()..].starts_with('/'))
        .filter_map(|name| name.split_once('@'))
        .map(|(_, version)| version)
        .filter(|version| minor(version) != ours)
        .collect();
    match other.first() {
        None => Ok(()),
        Some(version) => Err(LoadError::new(format!(
            "was built for {PACKAGE}@{version} and this host speaks {PACKAGE}@{PACKAGE_VERSION}: rebuild it with \
             millstream-guest {}, or update the host",
            minor(PACKAGE_VERSION)
        ))),
    }
}

/// The part of a version that must be equal: below 1.0 the minor, as semver has it.
fn minor(version: &str) -> &str {
    let dots = if version.starts_with("0.") { 2 } else { 1 };
    version.match_indices('.').nth(dots - 1).map_or(version, |(index, _)| &version[..index])
}

fn is_offered(import: &str) -> bool {
    let name = import.split_once('@').map_or(import, |(name, _)| name);
    OFFERED.contains(&name)
}

fn wrong_export(exports: &[String]) -> LoadError {
    let list = exports.iter().map(|export| format!("`{export}`")).collect::<Vec<_>>().join(", ");
    let what = match exports.first() {
        None => "is a component that exports nothing".to_owned(),
        Some(_) => format!("is a component of another world: it exports {list}"),
    };
    let near = exports.iter().find(|export| strsim::jaro_winkler(export, "handle") > 0.8);
    let hint = match near {
        Some(near) => format!("it exports `{near}`, a handler exports `handle`"),
        None => "a handler exports `handle`".to_owned(),
    };
    LoadError::new(format!(
        "{what}; {hint} ({PACKAGE}@{PACKAGE_VERSION}): did you forget #[millstream_guest::handler]?"
    ))
}

fn unknown_imports(unknown: &[&String]) -> LoadError {
    let described = unknown.iter().map(|import| {
        let name = import.split_once('@').map_or(import.as_str(), |(name, _)| name);
        let near = OFFERED.iter().map(|offered| (strsim::jaro_winkler(name, offered), offered));
        match near.max_by(|left, right| left.0.total_cmp(&right.0)) {
            Some((likeness, offered)) if likeness > 0.93 => format!("`{import}` (did you mean `{offered}`?)"),
            _ => format!("`{import}`"),
        }
    });
    let list = described.collect::<Vec<_>>().join(", ");
    LoadError::new(format!(
        "is a component of another world: it imports {list}, which this host does not offer; a handler may import \
         {PACKAGE}, wasi:logging, wasi:config and wasi 0.2 with outgoing http"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_what_semver_holds_compatible() {
        assert_eq!(minor("0.1.0"), "0.1");
        assert_eq!(minor("0.1.7"), "0.1");
        assert_eq!(minor("1.4.2"), "1");
        assert_eq!(minor("0.2.0-rc.1"), "0.2");
    }
}
