//! How many payload bytes all groups of this host hold together.

use std::{collections::HashMap, sync::Mutex};

use crate::engine::GroupId;

/// Bounds the host's memory, not a group's share: a group with nothing in hand may always claim one message.
#[derive(Debug)]
pub struct Budget {
    bytes_max: u64,
    held: Mutex<HashMap<GroupId, u64>>,
}

impl Budget {
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, held: Mutex::default() }
    }

    /// What a group holds now.
    pub fn set(&self, group: GroupId, bytes: u64) {
        self.held.lock().expect("adding does not panic").insert(group, bytes);
    }

    pub fn forget(&self, group: GroupId) {
        self.held.lock().expect("adding does not panic").remove(&group);
    }

    pub fn left(&self) -> u64 {
        let held: u64 = self.held.lock().expect("adding does not panic").values().sum();
        self.bytes_max.saturating_sub(held)
    }
}
