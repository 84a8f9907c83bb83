//! Paths and queries of the daemon's REST interface, and whether a host that is asked is this one.

use std::net::IpAddr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Characters that are not escaped in a path segment or in a query value.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Whether a host of a URL, without its port, is the loopback interface: what is sent there leaves this host by no network, and no
/// name of it can be another's.
pub fn is_this_host(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// The path of a resource of a VM: its name, and what follows that.
pub fn of_vm(vm: &str, rest: &str) -> String {
    format!("/v1/vms/{}{rest}", encoded(vm))
}

/// A name, encoded for a path segment or a query value.
pub fn encoded(name: &str) -> String {
    utf8_percent_encode(name, PLAIN).to_string()
}

/// The `values` that are present, as a query string.
pub fn query(values: &[(&str, Option<String>)]) -> String {
    let mut query = String::new();
    for (key, value) in values {
        if let Some(value) = value {
            query.push(if query.is_empty() { '?' } else { '&' });
            query.push_str(key);
            query.push('=');
            query.push_str(value);
        }
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_loopback_interface_are_this_host() {
        for host in [
            "localhost",
            "LocalHost",
            "127.0.0.1",
            "127.1.2.3",
            "[::1]",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(is_this_host(host), "{host}");
        }
        for host in [
            "",
            "localhost.example",
            "10.0.0.1",
            "[::]",
            "0.0.0.0",
            "127.0.0.1.example",
            "127.1",
        ] {
            assert!(!is_this_host(host), "{host}");
        }
    }
}
