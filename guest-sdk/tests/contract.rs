//! Goal: the SDK speaks the contract of the repository. Method: compare its own copy, which exists so that the crate can be
//! published, byte by byte.

#[test]
fn the_sdk_has_the_repositorys_contract() {
    let own = include_bytes!("../wit/handler.wit");
    let repository = include_bytes!("../../wit/handler.wit");
    assert!(own == repository, "guest-sdk/wit/handler.wit differs from wit/handler.wit: copy the latter over it");
}
