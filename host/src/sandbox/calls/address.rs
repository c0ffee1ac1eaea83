//! Which addresses are on the public internet. A pure function of one address: the rest of an SSRF guard is that the
//! addresses judged here are the ones that are connected to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Networks of IPv4 that no name in public DNS should lead to: first address, length of the prefix.
const NOT_PUBLIC: &[(Ipv4Addr, u32)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),        // this network; 0.0.0.0 reaches this machine
    (Ipv4Addr::new(10, 0, 0, 0), 8),       // private
    (Ipv4Addr::new(100, 64, 0, 0), 10),    // carrier-grade NAT; the metadata of one cloud is in it
    (Ipv4Addr::new(127, 0, 0, 0), 8),      // loopback
    (Ipv4Addr::new(168, 63, 129, 16), 32), // the host agent of one cloud, in the middle of public space
    (Ipv4Addr::new(169, 254, 0, 0), 16),   // link-local; metadata of most clouds
    (Ipv4Addr::new(172, 16, 0, 0), 12),    // private
    (Ipv4Addr::new(192, 0, 0, 0), 24),     // protocol assignments; metadata of one cloud
    (Ipv4Addr::new(192, 0, 2, 0), 24),     // documentation
    (Ipv4Addr::new(192, 88, 99, 0), 24),   // relays of 6to4
    (Ipv4Addr::new(192, 168, 0, 0), 16),   // private
    (Ipv4Addr::new(198, 18, 0, 0), 15),    // benchmarks
    (Ipv4Addr::new(198, 51, 100, 0), 24),  // documentation
    (Ipv4Addr::new(203, 0, 113, 0), 24),   // documentation
    (Ipv4Addr::new(224, 0, 0, 0), 4),      // multicast
    (Ipv4Addr::new(240, 0, 0, 0), 4),      // reserved, broadcast
];

/// Parts of the global unicast space of IPv6, 2000::/3, that are not public either. All else outside of that space is
/// refused whole: loopback, unspecified, link-local, unique local (metadata of one cloud is in it), multicast, and the
/// IPv4-compatible form.
const NOT_PUBLIC_V6: &[(Ipv6Addr, u32)] = &[
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments, Teredo (carries IPv4)
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16), // 6to4 (carries IPv4)
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
];

const GLOBAL_UNICAST_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

/// NAT64: the last 32 bits are an IPv4 address, and that is where the packets go.
const NAT64: (Ipv6Addr, u32) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);

/// Whether an address is on the public internet, and so may be reached by a name that the allow list holds.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(mapped) => is_public_v4(mapped),
            None if is_in_v6(address, NAT64) => is_public_v4(Ipv4Addr::from_bits(address.to_bits() as u32)),
            None => {
                is_in_v6(address, GLOBAL_UNICAST_V6) && !NOT_PUBLIC_V6.iter().any(|network| is_in_v6(address, *network))
            }
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !NOT_PUBLIC.iter().any(|(first, length)| (address.to_bits() ^ first.to_bits()) >> (32 - length) == 0)
}

fn is_in_v6(address: Ipv6Addr, (first, length): (Ipv6Addr, u32)) -> bool {
    (address.to_bits() ^ first.to_bits()) >> (128 - length) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of each class at both ends of its network, and what lies just beside it.
    #[test]
    fn every_class_ends_where_its_network_ends() {
        let not_public = [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.127.255.255",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.169.254",
            "169.254.0.0",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::a9fe:a9fe",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "fc00::1",
            "fd00:ec2::254",
            "fdff::1",
            "ff02::1",
            "100::1",
            "2001::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "::ffff:10.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0.0.0.0",
            "64:ff9b::10.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b::127.0.0.1",
            "64:ff9b:1::1",
            "4000::1",
        ];
        for address in not_public {
            assert!(!is_public(address.parse().expect("an address")), "{address} counts as public");
        }
        let public = [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "168.63.129.17",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.3.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2606:4700::1111",
            "2003::1",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
        ];
        for address in public {
            assert!(is_public(address.parse().expect("an address")), "{address} counts as not public");
        }
    }
}
