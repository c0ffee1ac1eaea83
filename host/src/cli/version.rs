//! `millstream version`: what this program is and what it is built on.

use serde::Serialize;

use super::Global;
use crate::database::MIGRATIONS;

/// The wasmtime this program holds. wasmtime does not tell at run time; a test compares this with Cargo.lock.
pub const WASMTIME: &str = "48.0.8";
/// The contract between host and handlers (wit/handler.wit).
pub const CONTRACT: &str = "millstream:handler@0.1.0";

#[derive(Serialize)]
struct Versions {
    version: &'static str,
    wasmtime: &'static str,
    contract: &'static str,
    /// The last migration this program knows.
    schema_version: i32,
}

pub(super) fn run(global: &Global) -> anyhow::Result<()> {
    let versions = Versions {
        version: env!("CARGO_PKG_VERSION"),
        wasmtime: WASMTIME,
        contract: CONTRACT,
        schema_version: MIGRATIONS.last().map_or(0, |migration| migration.version),
    };
    global.output().one(&versions, |versions| {
        format!(
            "millstream {}\nwasmtime {}\ncontract {}\nschema version {}\n",
            versions.version, versions.wasmtime, versions.contract, versions.schema_version
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_told_are_those_that_are_built() {
        let lock = include_str!("../../../Cargo.lock");
        assert!(lock.contains(&format!("name = \"wasmtime\"\nversion = \"{WASMTIME}\"\n")), "update WASMTIME");
        let contract = include_str!("../../../wit/handler.wit");
        assert!(contract.contains(&format!("package {CONTRACT};")), "update CONTRACT");
    }
}
