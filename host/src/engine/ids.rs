//! Numbers that must not be mixed up.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A stream; also the suffix of its tables.
    StreamId(i32)
}
id! {
    /// A consumer group.
    GroupId(i32)
}
id! {
    /// One life of one process. Never reused, and never taken up again once its lease has run out.
    HostId(i64)
}
id! {
    /// One claimed batch, and the fencing token of its deliveries. Never reused.
    ClaimId(i64)
}
