//! Opens connections: to addresses that were resolved once and admitted, and over TLS where the URL says so. Shared by all
//! handlers of a host; keeps no connection for a second call.

use std::{collections::BTreeMap, fs, net::IpAddr, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};
use wasmtime_wasi_http::Error;

use super::{
    allow::{AllowList, Host},
    failure,
    resolve::Resolver,
};

/// How long one address of several is tried: an address that swallows packets does not use up the whole time.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(3);

/// What both kinds of connections are.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<C: AsyncRead + AsyncWrite + Send + Unpin> Connection for C {}

/// Where a call goes.
#[derive(Debug)]
pub struct Destination {
    pub host: Host,
    pub port: u16,
    pub security: Security,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    Plain,
    Tls,
}

pub struct Client {
    resolver: Resolver,
    tls: TlsConnector,
}

impl Client {
    /// Trusts the public authorities, and those in `authorities_file` beside them.
    pub fn new(hosts: BTreeMap<String, Vec<IpAddr>>, authorities_file: Option<&Path>) -> anyhow::Result<Self> {
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.into() };
        if let Some(file) = authorities_file {
            add_authorities(&mut roots, file)
                .with_context(|| format!("read certificates from {} (SSL_CERT_FILE)", file.display()))?;
        }
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .context("set up TLS for handlers")?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { resolver: Resolver::new(hosts), tls: TlsConnector::from(Arc::new(config)) })
    }

    /// Connects, if every address the host stands for is admitted. Dropping this closes what was opened.
    pub async fn connect(&self, to: &Destination, allowed: &AllowList) -> Result<Box<dyn Connection>, Error> {
        let addresses = self.resolver.addresses(&to.host, to.port).await?;
        // One that is not admitted condemns the others: whoever answers for that name is not to be trusted.
        if !addresses.iter().all(|address| allowed.admits(&to.host, *address)) {
            return Err(Error::DestinationIpProhibited);
        }
        let stream = first_that_connects(&addresses).await?;
        // A request is one or two small writes, which must not wait for each other.
        stream.set_nodelay(true).map_err(|error| failure::connecting(&error))?;
        match to.security {
            Security::Plain => Ok(Box::new(stream)),
            Security::Tls => {
                let name = server_name(&to.host)?;
                let stream = self.tls.connect(name, stream).await.map_err(|error| failure::securing(&error))?;
                Ok(Box::new(stream))
            }
        }
    }
}

fn add_authorities(roots: &mut RootCertStore, file: &Path) -> anyhow::Result<()> {
    let pem = fs::read(file)?;
    let certificates = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let (added, _) = roots.add_parsable_certificates(certificates.context("read the PEM text")?);
    ensure!(added > 0, "there is no certificate in it: give a PEM file, or unset the variable");
    Ok(())
}

async fn first_that_connects(addresses: &[SocketAddr]) -> Result<TcpStream, Error> {
    let mut failed = Error::DestinationNotFound;
    for (index, address) in addresses.iter().enumerate() {
        let is_last = index + 1 == addresses.len();
        let connected = if is_last {
            TcpStream::connect(*address).await
        } else {
            match timeout(ADDRESS_TIMEOUT, TcpStream::connect(*address)).await {
                Ok(connected) => connected,
                Err(_) => continue,
            }
        };
        match connected {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = failure::connecting(&error),
        }
    }
    Err(failed)
}

fn server_name(host: &Host) -> Result<ServerName<'static>, Error> {
    match host {
        Host::Address(address) => Ok(ServerName::from(*address)),
        Host::Name(name) => ServerName::try_from(name.clone()).map_err(|_| Error::HttpRequestUriInvalid),
    }
}
