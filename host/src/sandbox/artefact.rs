//! Turns an artefact that we compiled back into a component. The one place of the host with `unsafe`.
#![expect(unsafe_code, reason = "wasmtime cannot verify native code; we can say where it comes from")]

use wasmtime::{Engine, Result, component::Component};

/// An artefact made by [`Artefact::compile`] in this process, or found in our cache with its checksum intact.
pub struct Artefact(Vec<u8>);

impl Artefact {
    /// Compiles a component.
    pub fn compile(engine: &Engine, component: &[u8]) -> Result<Self> {
        engine.precompile_component(component).map(Self)
    }

    /// `bytes` must be what [`Artefact::bytes`] gave: the cache, its only caller, knows by a checksum, and only we can
    /// write to its folder.
    pub(super) fn of_our_cache(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Fails when it was made by another wasmtime, for other settings or for another CPU.
    pub fn load(&self, engine: &Engine) -> Result<Component> {
        // SAFETY: by construction the bytes are what wasmtime compiled for us.
        unsafe { Component::deserialize(engine, &self.0) }
    }
}
