//! A client of redis that sets and gets pages, many commands at a time (RESP 2).

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use plimsoll_hcache::{PAGE_BYTES, Page};

use super::page_server::PageServer;

pub(super) struct Redis {
    input: BufReader<UnixStream>,
    commands: Vec<u8>,
}

impl Redis {
    pub(super) fn connect(path: &Path) -> std::io::Result<Self> {
        Ok(Self {
            input: BufReader::with_capacity(256 << 10, UnixStream::connect(path)?),
            commands: Vec::new(),
        })
    }

    fn send(&mut self) -> std::io::Result<()> {
        self.input.get_ref().write_all(&self.commands)?;
        self.commands.clear();
        Ok(())
    }

    fn expect(&mut self, text: &[u8]) -> anyhow::Result<()> {
        let mut reply = [0; 16];
        let reply = &mut reply[..text.len()];
        self.input.read_exact(reply)?;
        anyhow::ensure!(
            reply == text,
            "redis said {:?}",
            String::from_utf8_lossy(reply)
        );
        Ok(())
    }
}

impl PageServer for Redis {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()> {
        let mut page = [0; PAGE_BYTES];
        for &number in numbers {
            fill(number, &mut page);
            write!(
                self.commands,
                "*3\r\n$3\r\nSET\r\n$8\r\n{number:08x}\r\n$4096\r\n"
            )?;
            self.commands.extend_from_slice(&page);
            self.commands.extend_from_slice(b"\r\n");
        }
        self.send()?;
        for _ in numbers {
            self.expect(b"+OK\r\n")?;
        }
        Ok(())
    }

    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()> {
        let mut page = [0; PAGE_BYTES];
        for &number in numbers {
            write!(self.commands, "*2\r\n$3\r\nGET\r\n$8\r\n{number:08x}\r\n")?;
        }
        self.send()?;
        for &number in numbers {
            self.expect(b"$4096\r\n")?;
            self.input.read_exact(&mut page)?;
            self.expect(b"\r\n")?;
            read(number, &page);
        }
        Ok(())
    }
}
