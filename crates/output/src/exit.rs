//! How a run ends: its exit code, and its error on standard error.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; also when the reader of standard output went away early |
//! | 1 | failed |
//! | 2 | usage error |
//! | 3 | the server is unreachable |
//! | 4 | refused because of a guarantee; nothing was moved |
//! | 5 | partly applied |
//!
//! A verb returns [`anyhow::Error`]; one that holds a [`UsageError`] ends with 2, one that holds
//! [`Unreachable`] with 3, [`Forbidden`] with 4, [`PartialResult`] with 5, every other with 1. Only standard
//! output's own broken pipe is quiet: a socket that breaks inside a verb is a failure like any other.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;

use crate::text::is_unprintable;

/// Options or input that contradict each other or are out of range; nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// The server that a verb needs does not answer; the cause names it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Unreachable(pub anyhow::Error);

/// A guarantee or a floor forbids the request; nothing was moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Forbidden(pub String);

/// The request was carried out in part; the text states which part, and the state of the rest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PartialResult(pub String);

/// Fails with a [`UsageError`] made from a format string, as [`anyhow::bail!`] does with a failure.
#[macro_export]
macro_rules! bail_usage {
    ($($argument:tt)*) => {
        return Err($crate::exit::UsageError(format!($($argument)*)).into())
    };
}

/// Standard output that records whether its reader has gone.
#[derive(Debug)]
pub struct Output<W> {
    inner: W,
    reader_gone: bool,
}

impl<W: Write> Output<W> {
    /// Wraps a writer.
    pub fn new(inner: W) -> Self {
        Self {
            inner,
            reader_gone: false,
        }
    }

    /// Names standard output in an error, whose kind stays.
    fn watch<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            self.reader_gone |= error.kind() == io::ErrorKind::BrokenPipe;
            let named = format!("cannot write standard output: {error}");
            io::Error::new(error.kind(), named)
        })
    }

    /// Ends the run of `program`: reports an error to `complaints` unless the reader of this output
    /// went away.
    pub fn finish(
        mut self,
        program: &str,
        result: anyhow::Result<()>,
        complaints: &mut dyn Write,
    ) -> ExitCode {
        let result = result.and_then(|()| Ok(self.flush()?));
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) if self.reader_gone => ExitCode::SUCCESS,
            Err(error) => {
                // Standard error may be closed too; the exit code still reports the failure.
                // It may contain names from files and from daemons.
                let causes = with_causes(error.as_ref());
                let is_unsafe = |character: char| is_unprintable(character) && character != '\n';
                let causes = causes.replace(is_unsafe, "\u{fffd}");
                let _ = writeln!(complaints, "{program}: error: {causes}");
                code_of(&error)
            }
        }
    }
}

/// The exit code of a run that ends with this error.
pub fn code_of(error: &anyhow::Error) -> ExitCode {
    if error.downcast_ref::<UsageError>().is_some() {
        ExitCode::from(2)
    } else if error.downcast_ref::<Unreachable>().is_some() {
        ExitCode::from(3)
    } else if error.downcast_ref::<Forbidden>().is_some() {
        ExitCode::from(4)
    } else if error.downcast_ref::<PartialResult>().is_some() {
        ExitCode::from(5)
    } else {
        ExitCode::FAILURE
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = self.inner.write(bytes);
        self.watch(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.inner.flush();
        self.watch(result)
    }
}

/// Ends the run of `program` whose command line does not parse, or requests help or the version.
pub fn usage(program: &str, error: &clap::Error) -> ExitCode {
    // Either stream may be closed; the exit code still reports the failure.
    if error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = write!(io::stderr(), "{program}: {}", error.render());
    } else if let Err(error) = error.print().and_then(|()| io::stdout().flush())
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = writeln!(io::stderr(), "{program}: error: cannot write: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// An error with its causes in one line, each once: some libraries repeat the cause in their own
/// message.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.ends_with(&text) {
            line += ": ";
            line += &text;
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};
    use std::fs::File;
    use std::io::BufWriter;

    struct BrokenPipe;

    impl Write for BrokenPipe {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn standard_output_that_is_full_is_named() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let buffered = BufWriter::new(full.try_clone().unwrap());
        for inner in [Box::new(full) as Box<dyn Write>, Box::new(buffered)] {
            let mut output = Output::new(inner);
            let result = writeln!(output, "line").map_err(anyhow::Error::from);
            let mut complaints = Vec::new();
            let code = output.finish("plimsoll", result, &mut complaints);
            let why = "No space left on device (os error 28)";
            let said = format!("plimsoll: error: cannot write standard output: {why}\n");
            assert_eq!(String::from_utf8(complaints).unwrap(), said);
            assert_eq!(code, ExitCode::FAILURE);
        }
    }

    fn finish(result: anyhow::Result<()>) -> (ExitCode, String) {
        let mut complaints = Vec::new();
        let code = Output::new(Vec::new()).finish("plimsoll", result, &mut complaints);
        (code, String::from_utf8(complaints).unwrap())
    }

    #[test]
    fn the_exit_code_tells_usage_from_failure() {
        assert_eq!(finish(Ok(())), (ExitCode::SUCCESS, String::new()));
        let failed = finish(Err(anyhow!("no such trace").context("cannot read 'x'")));
        let said = "plimsoll: error: cannot read 'x': no such trace\n";
        assert_eq!(failed, (ExitCode::FAILURE, said.to_owned()));
        let usage = || -> anyhow::Result<()> { bail_usage!("--rate {} is too much", 2) };
        let said = "plimsoll: error: --rate 2 is too much\n".to_owned();
        assert_eq!(finish(usage()), (ExitCode::from(2), said));
        assert_eq!(finish(usage().context("mrc")).0, ExitCode::from(2));
        let gone = Unreachable(anyhow!("nobody").context("no server"));
        let said = "plimsoll: error: no server: nobody\n".to_owned();
        assert_eq!(finish(Err(gone.into())), (ExitCode::from(3), said));
        let forbidden = anyhow::Error::new(Forbidden("web would miss too much".to_owned()));
        assert_eq!(finish(Err(forbidden.context("apply"))).0, ExitCode::from(4));
        let partly = PartialResult("web has all, mail none".to_owned());
        assert_eq!(finish(Err(partly.into())).0, ExitCode::from(5));
    }

    #[test]
    fn an_error_moves_no_cursor_and_reorders_nothing() {
        let named = anyhow!("line 1\nline 2").context("VM \u{1b}[2J\u{202e}web\r");
        let said = "plimsoll: error: VM \u{fffd}[2J\u{fffd}web\u{fffd}: line 1\nline 2\n";
        assert_eq!(finish(Err(named)).1, said);
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure_but_a_broken_socket_is() {
        let mut output = Output::new(BrokenPipe);
        let result = writeln!(output, "line").map_err(anyhow::Error::from);
        let mut complaints = Vec::new();
        assert_eq!(
            output.finish("plimsoll", result, &mut complaints),
            ExitCode::SUCCESS
        );
        assert!(complaints.is_empty());
        let socket = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(finish(Err(socket.into())).0, ExitCode::FAILURE);
    }

    #[test]
    fn a_cause_its_error_already_names_is_said_once() {
        let cause = io::Error::other("disk on fire");
        let repeated = anyhow::Error::new(cause).context("cannot read: disk on fire");
        assert_eq!(with_causes(repeated.as_ref()), "cannot read: disk on fire");
    }
}
