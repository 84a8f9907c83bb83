//! Paths and queries of the daemon's REST interface.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Characters that are not escaped in a path segment or in a query value.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The path of a resource of a VM: its name, and what follows that.
#[must_use]
pub fn of_vm(vm: &str, rest: &str) -> String {
    format!("/v1/vms/{}{rest}", encoded(vm))
}

/// A name, encoded for a path segment or a query value.
#[must_use]
pub fn encoded(name: &str) -> String {
    utf8_percent_encode(name, PLAIN).to_string()
}

/// The `values` that are present, as a query string.
#[must_use]
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
