//! `plimsolld`: measures the memory needs of this host's VMs and allocates its memory among them.
#![forbid(unsafe_code)]

use std::io::{Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{self, Child, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use plimsoll_daemon::clock::Clock;
use plimsoll_daemon::config::{Config, ConfigError};
use plimsoll_daemon::history::{History, Limits};
use plimsoll_daemon::qemu_host::QemuHost;
use plimsoll_daemon::shared::{Command, SharedState, Snapshot};
use plimsoll_daemon::turn::Turns;
use plimsoll_daemon::{http, log};
use plimsoll_output::exit::{PartialResult, code_of, with_causes};
use plimsoll_output::printable_path;
use plimsoll_protocol::decision::Mode;
use plimsoll_vm::{HostMemory, own_program};
use sd_notify::NotifyState;
use tokio::sync::oneshot;

/// Maximum number of commands that wait for the turn loop.
const COMMANDS: usize = 64;
/// Time after a daemon was killed in which another one may be started instead.
const ORPHAN_WAIT: Duration = Duration::from_secs(5);

/// Trace this host's VMs, store their miss-ratio curves, and allocate its memory within each VM's limits.
///
/// By default it only observes: nothing is moved unless the configuration or an operator requests it.
#[derive(Debug, Parser)]
#[command(name = "plimsolld", version)]
struct Args {
    /// Configuration; FILE.d/*.toml is read as well [default: /etc/plimsoll/plimsoll.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only read the configuration and report its errors, and sizes that do not fit this host's RAM
    #[arg(long)]
    check_config: bool,
    /// Decide and record, but move nothing, whatever the mode
    #[arg(long)]
    dry_run: bool,
    /// Only give the VMs that were resized what they had when first found, if the configuration wants that at the
    /// daemon's end; for ExecStopPost= of the unit. Ends with 5 and names the VMs if some do not have it after 20 s
    #[arg(long)]
    give_back: bool,
    /// The same once standard input ends without a word: the daemon was killed
    #[arg(long, hide = true, requires = "give_back")]
    when_orphaned: bool,
    /// Only write the man page and the completions for bash, zsh and fish into this directory
    #[arg(long, hide = true, value_name = "FOLDER")]
    generate: Option<PathBuf>,
    /// Name of this host in all views and in reports on many hosts, up to 253 characters [default: the kernel's, which in a
    /// container is the container's]
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    host_name: Option<String>,
    /// Log level: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: tracing::Level,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plimsolld: {}", with_causes(error.as_ref()));
            code_of(&error)
        }
    }
}

/// The configuration of a host of this name, and notes on what was read.
fn load(
    path: Option<&Path>,
    host_name: Option<&str>,
) -> Result<(Config, Vec<String>), ConfigError> {
    let (mut config, notes) = Config::load(path)?;
    if let Some(name) = host_name {
        name.clone_into(&mut config.host_name);
    }
    Ok((config, notes))
}

/// A name as hosts have them: directories and labels contain it.
fn host_name(text: &str) -> Result<String, &'static str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    match (1..=253).contains(&text.len()) && text.chars().all(is_plain) && !text.starts_with('.') {
        true => Ok(text.to_owned()),
        false => Err("expected 1 to 253 letters, digits, '-', '.' or '_'"),
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    plimsoll_output::outlive_file_size_limit()?;
    if let Some(folder) = &args.generate {
        return generate(folder).with_context(|| format!("cannot write to '{}'", folder.display()));
    }
    if args.give_back && !args.check_config {
        log::begin(args.log)?;
        return give_back(args);
    }
    let (config, notes) = load(args.config.as_deref(), args.host_name.as_deref())?;
    if args.check_config {
        for note in notes {
            println!("{note}");
        }
        if rustix::process::geteuid().is_root() {
            if let Some(note) = http::check(&config.serve)? {
                println!("{note}");
            }
        } else {
            println!("as another user than root: groups, tokens and certificates are not checked");
        }
        for warning in config.warnings_for_ram(HostMemory::read()?.total_bytes) {
            println!("{warning}");
        }
        println!("the configuration is good");
        return Ok(());
    }
    log::begin(args.log)?;
    for note in notes {
        tracing::info!("{note}");
    }
    if config.history.is_none() && config.gives_back_on_exit && config.mode != Mode::Observe {
        tracing::warn!(
            "there is no history file: if the daemon crashes, VMs keep their sizes; only a clean stop gives memory back"
        );
    }
    let history = match &config.history {
        Some(path) => {
            let limits = Limits {
                bytes_max: config.history_bytes_max,
                keep: config.history_keep,
            };
            let (history, warnings) = History::open(path, limits)?;
            for warning in warnings {
                tracing::warn!("{warning}");
            }
            history
        }
        None => History::nowhere(),
    };
    let (sender, commands) = mpsc::sync_channel(COMMANDS);
    let shared = SharedState::new(
        Snapshot::before_the_first_turn(&config),
        sender.clone(),
        Arc::new(history),
        Clock::of_host(),
    );
    let shared = Arc::new(shared);
    let server = http::serve(Arc::clone(&shared), &config.serve)?;
    let stop = plimsoll_output::daemon_stop_flag()?;
    let hang_up = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&hang_up))?;

    let dead_mans_switch = config.gives_back_on_exit
        && config.history.is_some()
        && !args.dry_run
        // Under systemd, ExecStopPost= does it.
        && std::env::var_os("NOTIFY_SOCKET").is_none();
    let mut orphan: Option<Child> = None;
    let (path, host_name) = (args.config.clone(), args.host_name.clone());
    let reload = Box::new(move || match load(path.as_deref(), host_name.as_deref()) {
        Ok((config, _)) => Ok(config),
        Err(error) => Err(error.to_string()),
    });
    let host = QemuHost::new(&config, args.dry_run);
    let mode = config.mode;
    let mut turns = Turns::new(config, reload, host, Arc::clone(&shared), Instant::now());
    tracing::info!(mode = ?mode, dry_run = args.dry_run, "plimsolld {} begins", env!("CARGO_PKG_VERSION"));
    let mut ready = false;
    let watchdog = sd_notify::watchdog_enabled().unwrap_or(Duration::ZERO);
    let mut told = Instant::now();
    turns.report_progress(Box::new(move || {
        if !watchdog.is_zero() && told.elapsed() > watchdog / 3 {
            told = Instant::now();
            notify(&[NotifyState::Watchdog]);
        }
    }));
    let mut alive = |is_resized: bool| {
        // One that fails would fail again.
        let is_killed = |orphan: &mut Child| {
            let ended = orphan.try_wait().ok().flatten();
            ended.is_some_and(|status| status.signal().is_some())
        };
        if is_resized && dead_mans_switch && orphan.as_mut().is_none_or(is_killed) {
            orphan = start_orphan(args)
                .map_err(|error| {
                    tracing::warn!("if the daemon is killed, VMs keep what they have: {error}");
                })
                .ok();
        }
        if !ready {
            ready = true;
            notify(&[NotifyState::Ready]);
        }
        if hang_up.swap(false, Ordering::Relaxed) {
            // Nobody waits for the answer; the result is in the log.
            let _ = sender.try_send(Command::Reload(oneshot::channel().0));
        }
    };
    turns.run(&commands, &|| stop.load(Ordering::Relaxed), &mut alive);
    notify(&[NotifyState::Stopping]);
    server.stop();
    if let Some(mut orphan) = orphan {
        if let Some(mut input) = orphan.stdin.take() {
            let _ = input.write_all(b"ended");
        }
        let _ = orphan.wait();
    }
    tracing::info!("plimsolld ends");
    Ok(())
}

/// Writes `plimsolld.8` and completions, as `plimsoll generate` does for the commands.
fn generate(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut command = Args::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "plimsolld", folder)?;
    }
    clap_mangen::Man::new(command)
        .section("8")
        .generate_to(folder)?;
    Ok(())
}

/// Gives the VMs that an earlier daemon resized what they had. A wrong line of the configuration, with which no daemon starts,
/// is no reason to leave them without.
fn give_back(args: &Args) -> anyhow::Result<()> {
    let (mut config, errors) = Config::load_tolerantly(args.config.as_deref()).context(
        "VMs keep the sizes that they have, because it is open in which history theirs are",
    )?;
    for error in errors {
        tracing::warn!("{error}: VMs get memory back without that setting");
    }
    if args.when_orphaned {
        let mut word = Vec::new();
        // A broken pipe is an end as well.
        let _ = std::io::stdin().read_to_end(&mut word);
        if !word.is_empty() {
            return Ok(());
        }
        // A daemon that is started again meanwhile goes on with what it finds.
        std::thread::sleep(ORPHAN_WAIT);
    }
    let Some(path) = config.history.clone().filter(|_| config.gives_back_on_exit) else {
        tracing::info!("VMs keep what they have");
        return Ok(());
    };
    if !path.exists() {
        tracing::info!(
            "there is no history {}: no VM is known to have had another size",
            printable_path(&path)
        );
        return Ok(());
    }
    config.trace.enabled = false;
    let limits = Limits {
        bytes_max: config.history_bytes_max,
        keep: config.history_keep,
    };
    let (history, warnings) = History::open(&path, limits)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    if history.began_anew() {
        let lost = "the history is lost, so what VMs had is unknown: they keep what they have, which may be less";
        return Err(PartialResult(lost.to_owned()).into());
    }
    let (sender, _commands) = mpsc::sync_channel(COMMANDS);
    let shared = Arc::new(SharedState::new(
        Snapshot::before_the_first_turn(&config),
        sender,
        Arc::new(history),
        Clock::of_host(),
    ));
    let host = QemuHost::new(&config, args.dry_run);
    let reload = Box::new(|| Err("it only gives memory back".to_owned()));
    let mut turns = Turns::new(config, reload, host, shared, Instant::now());
    let lacks = turns.give_back_and_end();
    match lacks.as_slice() {
        [] => Ok(()),
        lacks => Err(PartialResult(format!(
            "not all VMs have what they had: {}",
            lacks.join("; ")
        ))
        .into()),
    }
}

/// Starts this program as a process that gives memory back if this one is killed. It outlives signals to this one's
/// process group.
fn start_orphan(args: &Args) -> std::io::Result<Child> {
    let mut command = process::Command::new(own_program()?);
    command.args(["--give-back", "--when-orphaned"]);
    if let Some(path) = &args.config {
        command.arg("--config").arg(path);
    }
    command
        .stdin(process::Stdio::piped())
        .process_group(0)
        .spawn()
}

/// Notifies systemd, if it listens.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("systemd could not be notified: {error}");
    }
}
