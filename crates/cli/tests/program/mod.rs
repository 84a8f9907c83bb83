//! The program run as a process.

use std::process::{Child, Command, Output};

/// Runs it to its end; exit code, standard output, standard error.
pub fn ran(command: &mut Command) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// A process that is killed when this goes.
pub struct KilledOnDrop(pub Child);

impl KilledOnDrop {
    /// Sends a signal and waits for the end; exit code.
    pub fn end_by(&mut self, signal: &str) -> Option<i32> {
        let mut kill = Command::new("kill");
        let sent = kill.args([signal, &self.0.id().to_string()]).status();
        assert!(sent.unwrap().success());
        self.0.wait().unwrap().code()
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
