//! A client of memcached that sets and gets pages, many at a time (text protocol).

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use plimsoll_hcache::{PAGE_BYTES, Page};

use super::page_server::PageServer;

pub(super) struct Memcached {
    input: BufReader<UnixStream>,
    commands: Vec<u8>,
    /// Whether sets are answered only as a whole, by what follows them.
    noreply: bool,
}

impl Memcached {
    pub(super) fn connect(path: &Path, noreply: bool) -> std::io::Result<Self> {
        Ok(Self {
            input: BufReader::with_capacity(256 << 10, UnixStream::connect(path)?),
            commands: Vec::new(),
            noreply,
        })
    }

    fn send(&mut self) -> std::io::Result<()> {
        self.input.get_ref().write_all(&self.commands)?;
        self.commands.clear();
        Ok(())
    }

    fn expect(&mut self, text: &[u8]) -> anyhow::Result<()> {
        let mut reply = [0; 32];
        let reply = &mut reply[..text.len()];
        self.input.read_exact(reply)?;
        let said = String::from_utf8_lossy(reply);
        anyhow::ensure!(reply == text, "memcached said {said:?}");
        Ok(())
    }
}

impl PageServer for Memcached {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()> {
        let mut page = [0; PAGE_BYTES];
        let noreply = if self.noreply { " noreply" } else { "" };
        for &number in numbers {
            fill(number, &mut page);
            write!(self.commands, "set {number:08x} 0 0 4096{noreply}\r\n")?;
            self.commands.extend_from_slice(&page);
            self.commands.extend_from_slice(b"\r\n");
        }
        if self.noreply {
            self.commands.extend_from_slice(b"mn\r\n");
        }
        self.send()?;
        if self.noreply {
            return self.expect(b"MN\r\n");
        }
        for _ in numbers {
            self.expect(b"STORED\r\n")?;
        }
        Ok(())
    }

    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()> {
        let mut page = [0; PAGE_BYTES];
        self.commands.extend_from_slice(b"get");
        for &number in numbers {
            write!(self.commands, " {number:08x}")?;
        }
        self.commands.extend_from_slice(b"\r\n");
        self.send()?;
        for &number in numbers {
            let head = format!("VALUE {number:08x} 0 4096\r\n");
            self.expect(head.as_bytes())?;
            self.input.read_exact(&mut page)?;
            self.expect(b"\r\n")?;
            read(number, &page);
        }
        self.expect(b"END\r\n")
    }
}
