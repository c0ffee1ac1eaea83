//! The one integration binary: one file per behaviour, so that wasmtime is linked once.

mod config;
