//! The screen of `plimsoll top`: the host with its VMs and control groups, live.
//!
//! A thread of its own queries the daemon, so that the screen answers keys while the daemon is slow. Whatever ends the
//! program, a panic too, the terminal is given back as it was.
//!
//! Not here: the daemon's answers in words (`plimsoll_report::words`).
#![forbid(unsafe_code)]

mod screen;

use std::io::{IsTerminal, stdout};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use plimsoll_output::exit::with_causes;
use plimsoll_output::{bail_usage, stop_flag};
use plimsoll_protocol::client::Client;
use plimsoll_protocol::subject::{Entry, Key, Subject};
use plimsoll_report::daemon::Daemon;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal;
use ratatui::text::Span;
use ratatui::{DefaultTerminal, Terminal};

use self::screen::{Detail, PauseRequest, Picture, Screen, Sort};

/// Size of a frame where there is no terminal, in characters and lines.
const SIZE: (u16, u16) = (80, 24);
/// From one question to the daemon to the next.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a key is waited for before the screen is drawn anew.
const KEY_WAIT: Duration = Duration::from_millis(100);
/// Period of the selected VM's history, and its number of points.
const HISTORY_MS: u64 = 30 * 60 * 1000;
const HISTORY_POINTS: usize = 120;
/// Decisions in the log.
const DECISIONS: usize = 20;

/// One frame as text, as large as the terminal.
///
/// # Errors
///
/// [`Unreachable`](plimsoll_output::exit::Unreachable) if the daemon does not answer.
pub fn once(daemon: &Daemon) -> anyhow::Result<String> {
    let mut screen = Screen::default();
    screen.update(Ok(look(daemon, None)?));
    let size = if stdout().is_terminal() {
        terminal::size().unwrap_or(SIZE)
    } else {
        SIZE
    };
    frame(&mut screen, size)
}

/// Shows the host until the user leaves.
///
/// # Errors
///
/// [`UsageError`](plimsoll_output::exit::UsageError) without a terminal, and the terminal's own.
pub fn run(daemon: Daemon) -> anyhow::Result<()> {
    if !stdout().is_terminal() {
        bail_usage!("top draws on a terminal; --once writes one frame as text");
    }
    let stop = stop_flag()?;
    let (asks, asked) = mpsc::channel();
    let (answers, answered) = mpsc::channel();
    thread::spawn(move || serve(&daemon, &asked, &answers));
    let mut terminal = ratatui::try_init()?;
    let ended = interact(&mut terminal, &asks, &answered, || {
        stop.load(Ordering::Relaxed)
    });
    ratatui::try_restore()?;
    ended
}

/// Commands to the thread that queries the daemon.
#[derive(Debug)]
enum WorkerCommand {
    /// This VM or control group is selected now.
    Selected(Key),
    /// Have nothing moved, or let it be moved again.
    Pause(PauseRequest),
}

/// What it answers.
#[derive(Debug)]
enum Answer {
    /// The host as it is now, or why that is unknown.
    Picture(Box<Result<Picture, String>>),
    /// What became of a wish.
    Wished(String),
}

/// Polls the daemon until the receiver is gone.
fn serve(daemon: &Daemon, asked: &Receiver<WorkerCommand>, answers: &Sender<Answer>) {
    let mut selected = None;
    loop {
        let picture = look(daemon, selected.as_ref());
        let picture = picture.map_err(|error| with_causes(error.as_ref()));
        if answers.send(Answer::Picture(Box::new(picture))).is_err() {
            return;
        }
        match asked.recv_timeout(LOOK_EVERY) {
            Ok(WorkerCommand::Selected(key)) => selected = Some(key),
            Ok(WorkerCommand::Pause(wish)) => {
                let done = match wish {
                    PauseRequest::Pause => daemon.ask(Client::pause).map(|done| ("paused", done)),
                    PauseRequest::Resume => {
                        daemon.ask(Client::resume).map(|done| ("resumed", done))
                    }
                };
                let said = match done {
                    Ok((what, done)) => match done.not_stored {
                        Some(why) => format!("{what}, until the daemon ends: {why}"),
                        None => what.to_owned(),
                    },
                    Err(error) => with_causes(error.as_ref()),
                };
                if answers.send(Answer::Wished(said)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The host, its decisions, and the selected VM or control group or the first one in full.
fn look(daemon: &Daemon, selected: Option<&Key>) -> anyhow::Result<Picture> {
    let host = daemon.host()?;
    let decisions = daemon.ask(|client| client.decisions(None, None, Some(DECISIONS)))?;
    let entries = screen::sorted(&host, Sort::default());
    let is_selected = |entry: &&Entry<'_>| Some(&entry.key()) == selected;
    let entry = entries.iter().find(is_selected).or(entries.first());
    let detail = match entry.map(|entry| entry.key()) {
        None => None,
        Some(key) => {
            let since = host.now_unix_ms.saturating_sub(HISTORY_MS);
            let subject = daemon.ask_by(&key, Subject::ask);
            let history = daemon.ask_by(&key, |client, key| {
                Subject::ask_history(client, key, since, HISTORY_POINTS)
            });
            // It may have ended since the list was made; there is then nothing to show of it.
            subject.ok().map(|subject| Detail {
                key,
                subject,
                samples: history.map_or_else(|_| Vec::new(), |history| history.samples),
            })
        }
    };
    Ok(Picture {
        host,
        detail,
        decisions,
    })
}

/// Draws, and carries out what keys request, until the user leaves.
fn interact(
    terminal: &mut DefaultTerminal,
    asks: &Sender<WorkerCommand>,
    answers: &Receiver<Answer>,
    stopped: impl Fn() -> bool,
) -> anyhow::Result<()> {
    let mut screen = Screen::default();
    while !stopped() {
        while let Ok(answer) = answers.try_recv() {
            match answer {
                Answer::Picture(picture) => screen.update(*picture),
                Answer::Wished(said) => screen.note(&said),
            }
        }
        terminal.draw(|frame| screen.draw(frame))?;
        if event::poll(KEY_WAIT)?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
        {
            match press(&mut screen, key) {
                KeyAction::Leave => break,
                // That thread ends with this one, so it receives every request.
                KeyAction::Send(ask) => asks.send(ask)?,
                KeyAction::Nothing => {}
            }
        }
    }
    Ok(())
}

/// What a key leads to.
#[derive(Debug)]
enum KeyAction {
    Nothing,
    Send(WorkerCommand),
    Leave,
}

fn press(screen: &mut Screen, key: KeyEvent) -> KeyAction {
    let selected = |key: Option<Key>| {
        key.map_or(KeyAction::Nothing, |key| {
            KeyAction::Send(WorkerCommand::Selected(key))
        })
    };
    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
        return KeyAction::Leave;
    }
    if screen.is_asking() {
        let wish = screen.answer(matches!(key.code, KeyCode::Char('y' | 'Y')));
        return wish.map_or(KeyAction::Nothing, |wish| {
            KeyAction::Send(WorkerCommand::Pause(wish))
        });
    }
    match key.code {
        KeyCode::Char('q') => return KeyAction::Leave,
        KeyCode::Esc if !screen.close() => return KeyAction::Leave,
        KeyCode::Down | KeyCode::Char('j') => return selected(screen.step(1)),
        KeyCode::Up | KeyCode::Char('k') => return selected(screen.step(-1)),
        KeyCode::Enter => screen.open_or_close(),
        KeyCode::Char('s') => screen.sort_next(),
        KeyCode::Char('p') => screen.ask(),
        _ => {}
    }
    KeyAction::Nothing
}

/// A frame as text.
fn frame(screen: &mut Screen, (width, height): (u16, u16)) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| screen.draw(frame))?;
    Ok(text(terminal.backend().buffer()))
}

fn text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for row in buffer
        .content()
        .chunks(usize::from(buffer.area.width).max(1))
    {
        let mut line = String::new();
        // A wide character is in its first cell and hides the next.
        let mut hidden = 0;
        for cell in row {
            if hidden == 0 {
                line.push_str(cell.symbol());
                hidden = Span::raw(cell.symbol()).width().max(1);
            }
            hidden -= 1;
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
