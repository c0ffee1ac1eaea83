//! What a group's `allow.http` lets a handler call: first by the request's own host and port, then by the addresses that
//! the host stands for.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, bail};

use super::address::is_public;

/// The host of a request or of an entry, in the one form that is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Lower case, without the dot of a complete name.
    Name(String),
    /// IPv4 also where it was written as an IPv4-mapped IPv6 address.
    Address(IpAddr),
}

impl Host {
    /// Reads what stands before the port in a URL or an entry: a name, or an address (IPv6 in brackets). Anything else
    /// that a resolver might take for an address, such as `127.1`, is a name here and judged by what it resolves to.
    pub fn parse(text: &str) -> Self {
        let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let address = match bracketed {
            Some(inside) => inside.parse::<Ipv6Addr>().ok().map(IpAddr::from),
            None => text.parse::<Ipv4Addr>().ok().map(IpAddr::from),
        };
        match address {
            Some(address) => Self::Address(address.to_canonical()),
            None => Self::Name(text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase()),
        }
    }
}

/// The entries of one group. Nothing is allowed that is not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    entries: Vec<(Host, u16)>,
}

impl AllowList {
    /// Reads entries of the form `host:port`.
    ///
    /// # Errors
    /// Names the entry that has another form; streams.toml has been checked for that.
    pub fn parse(entries: &[String]) -> anyhow::Result<Self> {
        let entry = |text: &String| {
            let (host, port) = text.rsplit_once(':').with_context(|| format!("find the port of {text:?}"))?;
            let port = port.parse::<u16>().with_context(|| format!("read the port of {text:?}"))?;
            if host.is_empty() {
                bail!("there is no host in {text:?}");
            }
            Ok((Host::parse(host), port))
        };
        Ok(Self { entries: entries.iter().map(entry).collect::<anyhow::Result<_>>()? })
    }

    /// Whether a request to this host and port may be tried at all.
    pub fn holds(&self, host: &Host, port: u16) -> bool {
        self.entries.iter().any(|(allowed, allowed_port)| allowed == host && *allowed_port == port)
    }

    /// Whether a request to `host`, which is in the list, may go to this address. One that is not public must be named
    /// itself: a name in DNS belongs to whoever runs that zone, and could be pointed at anything.
    pub fn admits(&self, host: &Host, address: SocketAddr) -> bool {
        let ip = address.ip().to_canonical();
        let is_localhost = matches!(host, Host::Name(name) if name == "localhost");
        is_public(address.ip()) || self.holds(&Host::Address(ip), address.port()) || (is_localhost && ip.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> AllowList {
        AllowList::parse(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>()).expect("a list")
    }

    #[test]
    fn hosts_and_ports_are_compared_in_one_form() {
        let list = list(&["Mail.Example:443", "10.0.0.5:80", "[::1]:80", "other.example.:80"]);
        for (host, port) in [
            ("mail.example", 443),
            ("MAIL.example.", 443),
            ("[::ffff:10.0.0.5]", 80),
            ("[0::1]", 80),
            ("other.example", 80),
        ] {
            assert!(list.holds(&Host::parse(host), port), "{host}:{port}");
        }
        for (host, port) in [
            ("mail.example", 80),
            ("mail.example.org", 443),
            ("x.mail.example", 443),
            ("10.0.0.6", 80),
            ("10.5", 80),
            ("::1", 80),
            ("", 443),
        ] {
            assert!(!list.holds(&Host::parse(host), port), "{host}:{port}");
        }
        assert!(!AllowList::default().holds(&Host::parse("mail.example"), 443));
    }

    #[test]
    fn an_address_that_is_not_public_must_be_named_itself() {
        let list = list(&["mail.example:443", "10.0.0.5:443", "localhost:443", "127.1:443"]);
        let admits = |host: &str, address: &str| list.admits(&Host::parse(host), address.parse().expect("an address"));
        assert!(admits("mail.example", "1.1.1.1:443") && admits("mail.example", "10.0.0.5:443"));
        assert!(admits("mail.example", "[::ffff:10.0.0.5]:443"));
        assert!(!admits("mail.example", "10.0.0.6:443") && !admits("mail.example", "10.0.0.5:80"));
        assert!(!admits("mail.example", "127.0.0.1:443") && !admits("127.1", "127.0.0.1:443"));
        // `localhost` names the loopback addresses and nothing else.
        assert!(admits("localhost", "127.0.0.1:443") && admits("localhost", "[::1]:443"));
        assert!(!admits("localhost", "10.0.0.6:443") && !admits("localhost", "169.254.169.254:443"));
    }

    #[test]
    fn an_entry_of_another_form_is_named() {
        for entry in ["mail.example", "mail.example:", "mail.example:70000", ":443"] {
            let error = format!("{:#}", AllowList::parse(&[entry.to_owned()]).expect_err("it is no entry"));
            assert!(error.contains(entry), "{error}");
        }
    }
}
