//! The `millstream` program.

fn main() {}
