//! From a host to its addresses, once for each call: what is found here is judged and then connected to, so no second
//! answer of a name server can slip in between.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::Arc,
};

use tokio::sync::Semaphore;
use wasmtime_wasi_http::Error;

use super::allow::Host;

/// Lookups at once on this host. One that hangs holds a thread until the system gives up, whatever became of its
/// delivery, and those threads serve files too.
const LOOKUPS_MAX: usize = 32;

/// Addresses of one name that are looked at; the rest is left out.
const ADDRESSES_MAX: usize = 8;

pub struct Resolver {
    /// Names that are answered from here, like a hosts file of our own.
    hosts: BTreeMap<String, Vec<IpAddr>>,
    lookups: Arc<Semaphore>,
}

impl Resolver {
    pub fn new(hosts: BTreeMap<String, Vec<IpAddr>>) -> Self {
        Self { hosts, lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)) }
    }

    /// The addresses of a host, at least one. Dropping this lets a lookup that has begun run out unheeded.
    pub async fn addresses(&self, host: &Host, port: u16) -> Result<Vec<SocketAddr>, Error> {
        let name = match host {
            Host::Address(address) => return Ok(vec![SocketAddr::new(*address, port)]),
            Host::Name(name) => name.clone(),
        };
        if let Some(addresses) = self.hosts.get(&name) {
            return Ok(addresses.iter().map(|address| SocketAddr::new(*address, port)).collect());
        }
        let place = self.lookups.clone().acquire_owned().await.map_err(|_| Error::DnsTimeout)?;
        let lookup = tokio::task::spawn_blocking(move || {
            let found = (name.as_str(), port).to_socket_addrs();
            let found = found.map(|found| found.take(ADDRESSES_MAX).collect::<Vec<_>>()).unwrap_or_default();
            drop(place);
            found
        });
        match lookup.await {
            Ok(addresses) if !addresses.is_empty() => Ok(addresses),
            // The system's own text says no more than this, in the language of the machine.
            _ => Err(Error::DnsError { rcode: Some("address not available".into()), info_code: None }),
        }
    }
}
