//! What the tests share.

pub mod handlers;
pub mod logs;
