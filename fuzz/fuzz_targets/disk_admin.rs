//! A hostile disk daemon: whatever it answers to whom, the client returns an error or a value, in time.
#![no_main]

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::disk_admin::{DiskAdminError, DiskStat, Request, ask_over};
use serde::de::DeserializeOwned;

/// The client's result if the daemon sends these bytes, and then no more.
fn asked<T: DeserializeOwned>(request: Request, answer: &[u8]) -> Result<T, DiskAdminError> {
    let (client, mut daemon) = UnixStream::pair().unwrap();
    daemon.write_all(answer).unwrap();
    daemon.shutdown(Shutdown::Write).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let result = ask_over(client, Path::new("admin"), request, deadline);
    assert!(Instant::now() < deadline);
    result
}

fuzz_target!(|input: &[u8]| {
    // More does not fit into the socket, which is read only after it was written.
    let input = &input[..input.len().min(1 << 16)];
    let result = match input.split_first() {
        // As it would be within an answer.
        Some((0, result)) => [&b"{\"schema\":1,\"result\":"[..], result, b"}\n"].concat(),
        _ => input.to_vec(),
    };
    let _ = asked::<DiskStat>(Request::Stat, &result);
    let _ = asked::<()>(Request::Resize { cache_bytes: 1 }, &result);
    if let Ok(Some(curve)) = asked::<Option<CurveJson>>(Request::Curve, &result)
        && let Ok(curve) = ByteCurve::new(&curve)
    {
        for bytes in [0, curve.end_bytes(), u64::MAX] {
            assert!((0.0..=1.0).contains(&curve.at(bytes).miss_ratio));
        }
    }
});
