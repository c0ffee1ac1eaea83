//! The Rust side of `wit/`, generated: the records of the contract and the traits that our imports implement.
//! Nothing is written by hand here.

wasmtime::component::bindgen!({
    path: "../wit",
    inline: "
        package millstream:host;

        /// What a handler may import from us beside wasi 0.2, and what it must export.
        world linked {
            include millstream:handler/handler@0.1.0;
            import wasi:logging/logging@0.1.0-draft;
        }
    ",
    world: "millstream:host/linked",
    // Most of our imports only fill buffers and never wait; a handler's export runs on a fiber, so that it can be interrupted.
    imports: {
        "millstream:handler/database.query": async | trappable,
        "millstream:handler/database.execute": async | trappable,
        default: trappable,
    },
    exports: { default: async },
});
