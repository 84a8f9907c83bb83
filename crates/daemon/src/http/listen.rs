//! Sockets: ownership, takeover from dead daemons, TLS.

use std::fmt::Display;
use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::iter;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::Group;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use x509_parser::time::ASN1Time;

use super::access::{Access, ListenerKind};
use super::certificates::Validity;
use crate::config::{ServeSettings, TcpSettings, TlsSettings};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Minimum length of a token.
const TOKEN_BYTES_MIN: usize = 16;
/// Maximum length of a token file.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Why the daemon does not serve. No socket is open, and no socket of another process was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Another daemon has the socket.
    #[error("another plimsolld serves there: {}", path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// The path is a file that we must not remove.
    #[error("{} is there already and is no socket; it was left alone", path.display())]
    NoSocket {
        /// The path of the socket.
        path: PathBuf,
    },
    /// A group that does not exist.
    #[error("{}: the group {group:?} does not exist", path.display())]
    NoGroup {
        /// The socket.
        path: PathBuf,
        /// The group.
        group: String,
    },
    /// A system call failed.
    #[error("cannot serve at {at}")]
    Listen {
        /// Path or address.
        at: String,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// TCP open to everybody.
    #[error(
        "TCP at {listen} requires a token (token_file) or client certificates (client_ca), except on a loopback address \
         with read_only = true"
    )]
    Open {
        /// The address.
        listen: SocketAddr,
    },
    /// A file with a token, a key or certificates that cannot be used.
    #[error("{}: {why}", path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// A listener, and the permissions of its clients.
#[derive(Debug)]
pub(super) struct GuardedListener {
    pub listener: Listener,
    pub access: Access,
    /// Of the server's certificate.
    pub validity: Option<Validity>,
}

/// The listening socket.
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener, Option<TlsAcceptor>),
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(listener) => listener.fmt(f),
            Self::Tcp(listener, _) => listener.fmt(f),
        }
    }
}

/// A path that we own until this is dropped, which removes its socket. The lock file beside it stays, so that nobody
/// can lock one that another process has removed.
#[derive(Debug)]
pub(super) struct Claim {
    path: PathBuf,
    _lock: File,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // If it is gone already, or cannot be removed, the next daemon takes it over.
        let _ = fs::remove_file(&self.path);
    }
}

/// Checks what can be checked of `settings` without opening a listener: groups, and the files of a token and of TLS.
///
/// The result is a note on a certificate that ends soon.
///
/// # Errors
///
/// [`ServeError`] for what [`serve`](super::serve) would refuse, and for a certificate that clients would.
pub fn check(settings: &ServeSettings) -> Result<Option<String>, ServeError> {
    let mut note = None;
    if let Some(tcp) = &settings.tcp
        && let (_, Some((_, validity))) = secrets(tcp)?
    {
        let now = ASN1Time::now();
        if let Some(fault) = validity.fault(now) {
            return Err(secret(&validity.file, fault));
        }
        note = validity.note(now);
    }
    for socket in sockets(settings) {
        socket
            .group
            .map(|group| gid(socket.path, group))
            .transpose()?;
    }
    Ok(note)
}

/// A Unix socket to be opened.
struct SocketSettings<'a> {
    path: &'a Path,
    read_only: bool,
    mode: u32,
    group: Option<&'a str>,
}

/// The Unix sockets of `settings`.
fn sockets(settings: &ServeSettings) -> impl Iterator<Item = SocketSettings<'_>> {
    let group = settings.group.as_deref();
    let control = SocketSettings {
        path: &settings.socket,
        read_only: false,
        mode: MODE,
        group,
    };
    let read_only = settings.read_only_socket.as_deref().map(|path| {
        let (mode, group) = match settings.read_only_group.as_deref().or(group) {
            Some(EVERYBODY) => (EVERYBODY_MODE, None),
            group => (MODE, group),
        };
        SocketSettings {
            path,
            read_only: true,
            mode,
            group,
        }
    });
    iter::once(control).chain(read_only)
}

/// Opens all listeners of `settings`.
pub(super) fn open(
    settings: &ServeSettings,
) -> Result<(Vec<GuardedListener>, Vec<Claim>), ServeError> {
    // First the checks that fail most easily, then changes visible to others.
    let tcp = settings.tcp.as_ref().map(open_tcp).transpose()?;
    let mut doors = Vec::new();
    let mut claims = Vec::new();
    for socket in sockets(settings) {
        let (listener, claim) = open_unix(socket.path, socket.mode, socket.group)?;
        claims.push(claim);
        doors.push(GuardedListener {
            listener: Listener::Unix(listener),
            access: Access {
                read_only: socket.read_only,
                token: None,
                way: ListenerKind::Unix,
            },
            validity: None,
        });
    }
    doors.extend(tcp);
    Ok((doors, claims))
}

/// Permissions of a socket: for root and its group.
const MODE: u32 = 0o660;
/// Used in place of a group: the read-only socket is for all users.
const EVERYBODY: &str = "everybody";
/// Permissions of such a socket.
const EVERYBODY_MODE: u32 = 0o666;

fn open_unix(
    path: &Path,
    mode: u32,
    group: Option<&str>,
) -> Result<(UnixListener, Claim), ServeError> {
    let failed = |source| ServeError::Listen {
        at: path.display().to_string(),
        source,
    };
    let gid = group.map(|group| gid(path, group)).transpose()?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let claim = claim(path)?;
    // Permissions are set before the first connection is possible.
    let listener = || -> io::Result<UnixListener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        chown(path, None, gid)?;
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(socket.into())
    };
    Ok((listener().map_err(failed)?, claim))
}

/// The id of the group of the socket at `path`.
fn gid(path: &Path, group: &str) -> Result<u32, ServeError> {
    let found = Group::from_name(group).map_err(|errno| ServeError::Listen {
        at: path.display().to_string(),
        source: errno.into(),
    })?;
    let found = found.ok_or_else(|| ServeError::NoGroup {
        path: path.to_owned(),
        group: group.to_owned(),
    })?;
    Ok(found.gid.as_raw())
}

/// Takes `path` over, and removes the socket of a daemon that has ended.
fn claim(path: &Path) -> Result<Claim, ServeError> {
    let failed = |source| ServeError::Listen {
        at: path.display().to_string(),
        source,
    };
    let taken = || ServeError::Taken {
        path: path.to_owned(),
    };
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ServeError::NoSocket {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let lock = File::options()
        .mode(0o600)
        .create(true)
        .truncate(false)
        .write(true)
        .open(lock)
        .map_err(failed)?;
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => taken(),
        TryLockError::Error(error) => failed(error),
    })?;
    // A server of another program takes no lock.
    match UnixStream::connect(path) {
        Ok(_) => return Err(taken()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
    }
    Ok(Claim {
        path: path.to_owned(),
        _lock: lock,
    })
}

fn open_tcp(settings: &TcpSettings) -> Result<GuardedListener, ServeError> {
    let listen = settings.listen;
    let loopback = listen.ip().is_loopback();
    let certificates = settings.tls.as_ref().and_then(|tls| tls.client_ca.as_ref());
    let known = settings.token_file.is_some() || certificates.is_some();
    let harmless = loopback && settings.read_only;
    if !(known || harmless) {
        return Err(ServeError::Open { listen });
    }
    let (token, tls) = secrets(settings)?;
    let (tls, validity) = tls.unzip();
    let listener = || -> io::Result<TcpListener> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let listener = listener().map_err(|source| ServeError::Listen {
        at: listen.to_string(),
        source,
    })?;
    Ok(GuardedListener {
        listener: Listener::Tcp(listener, tls),
        access: Access {
            read_only: settings.read_only,
            token,
            way: if loopback {
                ListenerKind::Loopback
            } else {
                ListenerKind::Network
            },
        },
        validity,
    })
}

/// The clients' token and the server's TLS, if any.
type Secrets = (Option<Arc<str>>, Option<(TlsAcceptor, Validity)>);

fn secrets(settings: &TcpSettings) -> Result<Secrets, ServeError> {
    let token = settings.token_file.as_deref().map(token).transpose()?;
    Ok((token, settings.tls.as_ref().map(tls).transpose()?))
}

/// The token in a file that other users must not be able to read.
fn token(path: &Path) -> Result<Arc<str>, ServeError> {
    let wrong = |why: String| secret(path, why);
    check_private(path)?;
    if fs::metadata(path)
        .map_err(|error| wrong(error.to_string()))?
        .len()
        > TOKEN_BYTES_MAX
    {
        return Err(wrong(format!("a token of over {TOKEN_BYTES_MAX} bytes")));
    }
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let token = text.trim();
    if token.len() < TOKEN_BYTES_MIN {
        let short = format!("a token of under {TOKEN_BYTES_MIN} bytes can be guessed");
        return Err(wrong(short));
    }
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong(
            "a token is one word of visible ASCII characters".to_owned(),
        ));
    }
    Ok(token.into())
}

fn tls(settings: &TlsSettings) -> Result<(TlsAcceptor, Validity), ServeError> {
    let certificates = certificates(&settings.certificate)?;
    let validity = Validity::new(&settings.certificate, &certificates[0])
        .map_err(|error| secret(&settings.certificate, error))?;
    check_private(&settings.key)?;
    let key = PrivateKeyDer::from_pem_file(&settings.key);
    let key = key.map_err(|error| secret(&settings.key, error))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| secret(&settings.certificate, error))?;
    let builder = match &settings.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in self::certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|error| secret(path, error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
                .build()
                .map_err(|error| secret(path, error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                let certificate = settings.certificate.display();
                let other = format!("the key is not that of the certificate in {certificate}");
                secret(&settings.key, other)
            }
            error => secret(&settings.certificate, error),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((Arc::new(config).into(), validity))
}

/// The certificates in a PEM file: at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ServeError> {
    let read = || -> Result<Vec<_>, pem::Error> { CertificateDer::pem_file_iter(path)?.collect() };
    let certificates = read().map_err(|error| secret(path, error))?;
    if certificates.is_empty() {
        return Err(secret(path, "no certificate in it"));
    }
    Ok(certificates)
}

/// Refuses a secret that all users can read.
fn check_private(path: &Path) -> Result<(), ServeError> {
    let found = fs::metadata(path).map_err(|error| secret(path, error))?;
    if found.permissions().mode() & 0o007 != 0 {
        return Err(secret(path, "others may read or write it: chmod o= it"));
    }
    Ok(())
}

fn secret(path: &Path, why: impl Display) -> ServeError {
    ServeError::Secret {
        path: path.to_owned(),
        why: why.to_string(),
    }
}
