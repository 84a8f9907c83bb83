//! The sockets of a disk daemon: for the VM's frontends, and for its administrator.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

use crate::DiskError;
use crate::storage::in_time;

/// A listening UNIX socket. If [`bind`](Self::bind) made its file, that is removed when this is dropped.
#[derive(Debug)]
pub struct Listener {
    pub(crate) socket: UnixListener,
    /// The file, and its inode: a later one of the same name is not ours.
    file: Option<(PathBuf, u64)>,
}

impl Listener {
    /// Listens at `path`, without blocking, with the permissions `mode` from the first connection on. A socket at which
    /// nobody listens any more is replaced.
    ///
    /// # Errors
    ///
    /// [`DiskError::NoSocket`] if `path` is something else, [`DiskError::SocketInUse`] if another process listens there
    /// for two seconds, else [`DiskError::Socket`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, DiskError> {
        let failed = |source| DiskError::Socket {
            socket: path.display().to_string(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                let path = path.to_owned();
                return Err(DiskError::NoSocket { path });
            }
            Ok(_) => {
                // The socket of a killed daemon: nobody listens, or soon nobody does.
                let gone = in_time(|| match UnixStream::connect(path) {
                    Ok(_) => Ok(false),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
                    Err(error) => Err(failed(error)),
                })?;
                if !gone {
                    let path = path.to_owned();
                    return Err(DiskError::SocketInUse { path });
                }
                fs::remove_file(path).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| failed(error.into()))?;
        let bound = SocketAddrUnix::new(path).and_then(|address| bind(&socket, &address));
        bound.map_err(|error| failed(error.into()))?;
        let inode = fs::symlink_metadata(path).map_err(failed)?.ino();
        let listener = Self {
            socket: UnixListener::from(socket),
            file: Some((path.to_owned(), inode)),
        };
        // Nobody can connect before it listens, so the mode that the umask left is harmless.
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        listen(&listener.socket, 128).map_err(|error| failed(error.into()))?;
        Ok(listener)
    }

    /// A socket that listens already, whose file is not ours.
    pub(crate) fn inherited(socket: UnixListener) -> Self {
        Self { socket, file: None }
    }

    /// The socket alone, for another thread; this still removes the file.
    ///
    /// # Errors
    ///
    /// The kernel's, if no descriptor is left.
    pub fn socket(&self) -> io::Result<UnixListener> {
        self.socket.try_clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, inode)) = &self.file
            && fs::symlink_metadata(path).is_ok_and(|now| now.ino() == *inode)
        {
            let _ = fs::remove_file(path);
        }
    }
}
