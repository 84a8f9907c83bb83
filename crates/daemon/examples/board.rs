//! Serves an example host, to view the web page and to try clients: `board [PORT] [SOCKET]`.
//!
//! The page is at http://127.0.0.1:PORT/#token=TOKEN (port 7070 by default), the API at SOCKET too.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_daemon::config::{ServeSettings, TcpSettings};
use plimsoll_daemon::http;

#[allow(dead_code, reason = "shared with unit tests")]
#[path = "../tests/common/example.rs"]
mod example;

/// Long enough for a daemon, and not secret: the example moves no real memory.
const TOKEN: &str = "example-example-example";

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let port = args.next().map_or(Ok(7070), |port| port.parse())?;
    let folder = std::env::temp_dir().join(format!("plimsoll-board-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let socket = args
        .next()
        .map_or(folder.join("plimsolld.sock"), PathBuf::from);
    let token = folder.join("token");
    fs::write(&token, TOKEN)?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    let settings = ServeSettings {
        socket: socket.clone(),
        group: None,
        read_only_socket: Some(socket.with_extension("ro.sock")),
        read_only_group: None,
        curve_buckets: true,
        tcp: Some(TcpSettings {
            listen: ([127, 0, 0, 1], port).into(),
            token_file: Some(token),
            tls: None,
            read_only: false,
        }),
    };
    let (shared, commands) = example::shared();
    let server = http::serve(shared.clone(), &settings)?;
    fs::remove_file(folder.join("token"))?;
    if let Some(address) = server.tcp() {
        println!("http://{address}/#token={TOKEN}");
    }
    println!("{}", socket.display());
    example::run(&shared, &commands, Duration::from_secs(2));
    Ok(())
}
