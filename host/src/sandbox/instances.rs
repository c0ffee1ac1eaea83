//! Where instances come from and how many may exist. A full pool is a wait; idle instances (`instance = "reuse"`) give
//! way to whoever waits.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    task::Poll,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::Store;

use super::{bindings::Linked, delivery::Delivery, state::State};

/// A place in the pool. Held by a running call and by an idle instance.
pub type Place = OwnedSemaphorePermit;

/// An instance that has served without a fault and can serve again.
pub struct Instance {
    pub store: Store<State>,
    pub linked: Linked,
    pub delivery: Arc<Delivery>,
    /// How many messages it has served.
    pub served: u32,
    /// Given back to the pool with the instance.
    pub _place: Place,
}

/// The idle instances of one group's handler.
pub type Idle = Mutex<Vec<Instance>>;

/// All places of the pool, and who has idle ones.
pub struct Places {
    places: Arc<Semaphore>,
    idle: Mutex<Vec<Weak<Idle>>>,
}

impl Places {
    pub fn new(count: u32) -> Self {
        Self { places: Arc::new(Semaphore::new(count as usize)), idle: Mutex::default() }
    }

    /// Remembers a handler whose idle instances may be taken away.
    pub fn register(&self, idle: &Arc<Idle>) {
        let mut all = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|idle| idle.strong_count() > 0);
        all.push(Arc::downgrade(idle));
    }

    /// Waits for a place. Dropping this leaves the queue.
    pub async fn take(&self) -> Place {
        let mut place = pin!(self.places.clone().acquire_owned());
        let queued = poll_fn(|context| Poll::Ready(place.as_mut().poll(context))).await;
        let place = match queued {
            Poll::Ready(place) => place,
            Poll::Pending => {
                // In this order no idle instance is missed: `give_back` keeps none while somebody is queued.
                self.drop_one_idle();
                place.await
            }
        };
        place.expect("the semaphore is never closed")
    }

    /// Keeps an instance for the next message, unless its place is wanted.
    pub fn give_back(&self, idle: &Idle, instance: Instance) {
        let mut all = idle.lock().unwrap_or_else(PoisonError::into_inner);
        if self.places.available_permits() > 0 {
            all.push(instance);
        }
    }

    fn drop_one_idle(&self) {
        let all: Vec<_> = self.idle.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for idle in all.iter().filter_map(Weak::upgrade) {
            // The store is dropped after the lock: it gives memory back to the system.
            let instance = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if instance.is_some() {
                return;
            }
        }
    }
}
