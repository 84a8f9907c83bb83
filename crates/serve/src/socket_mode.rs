//! Permissions of sockets on the command line.

/// Reads permissions in octal.
pub(crate) fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("'{text}' is not a mode: write it in octal, such as 600 or 660"))
}
