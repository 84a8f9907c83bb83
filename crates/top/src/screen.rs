//! Contents and drawing of the screen of `plimsoll top`.

use std::cmp::Reverse;

use plimsoll_flow::Whole as _;
use plimsoll_protocol::decision::{Decision, State};
use plimsoll_protocol::group::GroupSummary;
use plimsoll_protocol::vm::{HostView, Sample, TraceView, VmStatus, VmSummary};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::canvas::{Canvas, Line as Stroke};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table, TableState, Wrap};

use plimsoll_output::{cut_middle, duration, printable};
use plimsoll_protocol::subject::{Entry, Key, Subject};
use plimsoll_report::daemon::curve_of;
use plimsoll_report::words::{
    UNKNOWN, maybe_size, name, name_of, percent, ratio, relative, size, time_of_day, working_set,
};

/// The least terminal that holds everything.
const LEAST: (u16, u16) = (72, 18);
/// Minimum width of a list that also shows how each VM is traced.
const WIDE: u16 = 100;

/// The answers of one poll of the daemon.
#[derive(Debug, Clone)]
pub struct Picture {
    pub host: HostView,
    /// The selected VM or control group.
    pub detail: Option<Detail>,
    /// Newest first.
    pub decisions: Vec<Decision>,
}

/// A VM or a control group in full, with its last half hour.
#[derive(Debug, Clone)]
pub struct Detail {
    /// [`Entry::key`].
    pub key: Key,
    pub subject: Subject,
    pub samples: Vec<Sample>,
}

/// The VMs of a host, sorted, and below them its control groups by name.
pub fn sorted(host: &HostView, sort: Sort) -> Vec<Entry<'_>> {
    let mut vms: Vec<_> = host.vms.iter().collect();
    sort.sort(&mut vms);
    let groups = host.groups.watched.iter().map(Entry::Group);
    vms.into_iter().map(Entry::Vm).chain(groups).collect()
}

/// What the operator wants of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseRequest {
    Pause,
    Resume,
}

/// By what the list of VMs is sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sort {
    /// Those that need attention first.
    #[default]
    Status,
    Name,
    Size,
    Misses,
    Gives,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Status => Self::Name,
            Self::Name => Self::Size,
            Self::Size => Self::Misses,
            Self::Misses => Self::Gives,
            Self::Gives => Self::Status,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Name => "name",
            Self::Size => "size",
            Self::Misses => "misses",
            Self::Gives => "could give",
        }
    }

    fn sort(self, vms: &mut [&VmSummary]) {
        // Names make the order whole, whatever the key.
        vms.sort_by(|one, other| one.vm.cmp(&other.vm));
        match self {
            Self::Name => {}
            Self::Status => vms.sort_by_key(|vm| urgency(vm.status)),
            Self::Size => vms.sort_by_key(|vm| Reverse(vm.size_bytes)),
            Self::Gives => vms.sort_by_key(|vm| Reverse(vm.reclaimable_bytes)),
            Self::Misses => vms.sort_by(|one, other| {
                let misses = |vm: &VmSummary| vm.relative.map_or(-1.0, |at| at.expected);
                misses(other).total_cmp(&misses(one))
            }),
        }
    }
}

fn urgency(status: VmStatus) -> u8 {
    match status {
        VmStatus::Violating => 0,
        VmStatus::Tight => 1,
        VmStatus::Unknown => 2,
        VmStatus::Safe => 3,
    }
}

/// The screen.
#[derive(Debug, Default)]
pub struct Screen {
    picture: Option<Picture>,
    /// Why the picture is not a new one.
    trouble: Option<String>,
    /// What became of the last wish.
    note: Option<String>,
    selected: Option<Key>,
    sort: Sort,
    /// What is selected has the room of the list.
    is_open: bool,
    asking: Option<PauseRequest>,
    table: TableState,
}

impl Screen {
    /// Takes a new picture, or why there is none; the old one then stays.
    pub fn update(&mut self, picture: Result<Picture, String>) {
        match picture {
            Ok(picture) => {
                self.trouble = None;
                self.picture = Some(picture);
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// Takes what became of a wish.
    pub fn note(&mut self, note: &str) {
        self.note = Some(printable(note));
    }

    /// Selects another entry, so many lines further down; its key.
    pub fn step(&mut self, lines: isize) -> Option<Key> {
        let entries = self.sorted();
        let last = entries.len().checked_sub(1)?;
        let at = self
            .selected_at(&entries)
            .saturating_add_signed(lines)
            .min(last);
        let key = entries[at].key();
        self.selected = Some(key.clone());
        Some(key)
    }

    /// Gives the selected VM the room of the list, or takes it back.
    pub fn open_or_close(&mut self) {
        self.is_open = !self.is_open;
    }

    /// Goes back to the list; whether it was not there.
    pub fn close(&mut self) -> bool {
        std::mem::take(&mut self.is_open)
    }

    /// Sorts by the next key.
    pub fn sort_next(&mut self) {
        self.sort = self.sort.next();
    }

    /// Asks whether to pause, or to resume.
    pub fn ask(&mut self) {
        let host = self.picture.as_ref().map(|picture| &picture.host);
        self.note = None;
        self.asking = host.map(|host| {
            if host.paused {
                PauseRequest::Resume
            } else {
                PauseRequest::Pause
            }
        });
    }

    /// Whether a question is open.
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Takes the answer to the question.
    pub fn answer(&mut self, yes: bool) -> Option<PauseRequest> {
        self.asking.take().filter(|_| yes)
    }

    fn sorted(&self) -> Vec<Entry<'_>> {
        let host = self.picture.as_ref().map(|picture| &picture.host);
        host.map_or_else(Vec::new, |host| sorted(host, self.sort))
    }

    fn selected_at(&self, entries: &[Entry<'_>]) -> usize {
        let shown = || Some(&self.picture.as_ref()?.detail.as_ref()?.key);
        let key = self.selected.as_ref().or_else(shown);
        let mut entries = entries.iter();
        entries
            .position(|entry| Some(&entry.key()) == key)
            .unwrap_or(0)
    }

    /// Draws everything.
    pub fn draw(&mut self, frame: &mut Frame) {
        let area = frame.area();
        if area.width < LEAST.0 || area.height < LEAST.1 {
            let small = format!("needs {} x {} characters", LEAST.0, LEAST.1);
            frame.render_widget(Paragraph::new(small), area);
            return;
        }
        let Some(picture) = self.picture.clone() else {
            let waiting = self
                .trouble
                .as_deref()
                .unwrap_or("waiting for plimsolld ...");
            let waiting = Paragraph::new(printable(waiting)).wrap(Wrap { trim: true });
            frame.render_widget(waiting, area);
            return;
        };
        // The list has what it needs, as far as the rest leaves it that.
        let rows = picture.host.vms.len() + picture.host.groups.watched.len();
        let rows = u16::try_from(rows).unwrap_or(u16::MAX);
        let list = rows.saturating_add(1).clamp(4, (area.height - 4) / 3 + 1);
        let list = if self.is_open { 0 } else { list };
        let [head, bar, vms, detail, log, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(2),
            Constraint::Length(list),
            Constraint::Min(7),
            Constraint::Length(if self.is_open { 4 } else { 5 }),
            Constraint::Length(1),
        ])
        .areas(area);
        self.draw_head(&picture.host, frame, head);
        draw_bar(&picture.host, frame, bar);
        if !self.is_open {
            self.draw_list(frame, vms);
        }
        match &picture.detail {
            Some(shown) => draw_detail(shown, frame, detail),
            None => frame.render_widget(Paragraph::new("No VM was found."), detail),
        }
        draw_log(&picture, frame, log);
        self.draw_foot(&picture.host, frame, foot);
    }

    fn draw_head(&self, host: &HostView, frame: &mut Frame, area: Rect) {
        let mut line = Line::from(vec![
            Span::raw("Plimsoll ").bold(),
            Span::raw(name(&host.host)),
            Span::raw(format!(
                "  mode {}  {}  turn {} of {}  {}",
                name_of(host.mode),
                name_of(host.phase),
                host.turn,
                duration(host.turn_interval_ms as f64 / 1000.0),
                time_of_day(host.now_unix_ms),
            )),
        ]);
        if host.paused {
            line.push_span(Span::raw("  PAUSED").bold().yellow());
        }
        if let Some(decision) = host.moving {
            line.push_span(Span::raw(format!("  moving #{decision}")).bold().cyan());
        }
        if self.trouble.is_some() {
            line.push_span(Span::raw("  NO ANSWER").bold().red());
        }
        frame.render_widget(line, area);
    }

    fn draw_list(&mut self, frame: &mut Frame, area: Rect) {
        let entries = self.sorted();
        let at = self.selected_at(&entries);
        let is_wide = area.width >= WIDE;
        let widths = [9, 8, 8, 9, 10, 8, 6].into_iter();
        let widths: Vec<_> = widths.chain(is_wide.then_some(20)).collect();
        // Columns have a space between them, and the selected row begins with a sign.
        let others = widths.iter().map(|width| width + 1).sum::<u16>() + 1;
        let letters = usize::from(area.width.saturating_sub(others));
        let named = |name: &str| cut_middle(&printable(name), letters);
        let rows = entries.iter().map(|entry| match entry {
            Entry::Vm(vm) => row(vm, named(&vm.vm), is_wide),
            Entry::Group(group) => group_row(group, named(&group.group), is_wide),
        });
        let rows: Vec<_> = rows.collect();
        let heads = ["size", "target", "uses", "misses", "gives", "cost"];
        let heads = heads.map(right).into_iter();
        let heads = ["VM".into(), "status".into()].into_iter().chain(heads);
        let heads = heads.chain(is_wide.then(|| "traced".into()));
        let widths = widths.into_iter().map(Constraint::Length);
        let widths = [Constraint::Fill(1)].into_iter().chain(widths);
        let table = Table::new(rows, widths)
            .header(Row::new(heads).bold())
            .row_highlight_style(Modifier::REVERSED)
            .highlight_symbol(">");
        self.table.select(Some(at));
        frame.render_stateful_widget(table, area, &mut self.table);
    }

    fn draw_foot(&self, host: &HostView, frame: &mut Frame, area: Rect) {
        let line = match (self.asking, &self.trouble, &self.note) {
            (Some(PauseRequest::Pause), ..) => {
                Line::raw("Move nothing from now on? y / n").bold().yellow()
            }
            (Some(PauseRequest::Resume), ..) => Line::raw("Let memory be moved again? y / n")
                .bold()
                .yellow(),
            (None, Some(trouble), _) => Line::raw(printable(trouble)).red(),
            (None, None, Some(note)) => Line::raw(note.clone()).bold(),
            (None, None, None) => Line::raw(format!(
                "↑↓ VM  ⏎ {}  s sort: {}  p {}  q quit",
                if self.is_open { "list" } else { "more of it" },
                self.sort.name(),
                if host.paused { "resume" } else { "pause" },
            ))
            .dim(),
        };
        frame.render_widget(line, area);
    }
}

fn row(vm: &VmSummary, name: String, is_wide: bool) -> Row<'static> {
    let overhead = vm
        .trace
        .as_ref()
        .map(|trace| percent(trace.overhead_ratio).replace(' ', ""));
    let misses = vm.relative.map_or_else(
        || UNKNOWN.to_owned(),
        |at| format!("{} ≤{}", ratio(at.expected), ratio(at.high)),
    );
    let cells = [
        Cell::new(name),
        Cell::new(name_of(vm.status)).style(style_of(vm.status)),
        right(&size(vm.size_bytes)),
        right(&vm.target_bytes.map(size).unwrap_or_default()),
        right(&working_set(vm.working_set.as_ref())),
        right(&misses),
        right(&maybe_size(vm.reclaimable_bytes)),
        right(&overhead.unwrap_or_default()),
    ];
    let traced = is_wide.then(|| Cell::new(Entry::Vm(vm).traced()));
    Row::new(cells.into_iter().chain(traced))
}

/// A control group: its kind stands in place of a status, and what it is charged is its size.
fn group_row(group: &GroupSummary, name: String, is_wide: bool) -> Row<'static> {
    let trace = group.trace.as_ref();
    let overhead = trace.map(|trace| percent(trace.overhead_ratio).replace(' ', ""));
    let cells = [
        Cell::new(name),
        Cell::new(group.kind.to_string()).style(Style::new().dim()),
        right(&maybe_size(group.charged_bytes)),
        right(""),
        right(&working_set(group.working_set.as_ref())),
        right(""),
        right(""),
        right(&overhead.unwrap_or_default()),
    ];
    let traced = is_wide.then(|| Cell::new(Entry::Group(group).traced()));
    Row::new(cells.into_iter().chain(traced))
}

/// A cell whose text ends at its right.
fn right(text: &str) -> Cell<'static> {
    Cell::new(Text::raw(text.to_owned()).right_aligned())
}

fn style_of(status: VmStatus) -> Style {
    let color = match status {
        VmStatus::Safe => Color::Green,
        VmStatus::Tight => Color::Yellow,
        VmStatus::Violating => Color::Red,
        VmStatus::Unknown => return Style::new().dim(),
    };
    Style::new().fg(color)
}

/// Who has the memory that is divided.
fn draw_bar(host: &HostView, frame: &mut Frame, area: Rect) {
    let memory = &host.memory;
    let parts = [
        ('█', Color::Blue, "own", memory.vms_direct_bytes),
        ('▓', Color::Cyan, "cache", memory.vms_cache_bytes),
        ('▒', Color::Magenta, "store", memory.store_bytes),
        ('░', Color::Gray, "spare", memory.spare_bytes),
    ];
    let all: f64 = parts.iter().map(|(.., bytes)| *bytes as f64).sum();
    let letters = f64::from(area.width);
    let mut bar = Line::default();
    let mut legend = Line::raw(format!(
        "could take {} of {}:",
        size(memory.reclaimable_bytes),
        size(memory.divided_bytes)
    ));
    let (mut sum, mut drawn) = (0.0, 0);
    for (letter, color, name, bytes) in parts {
        sum += bytes as f64;
        let end = usize::whole((sum / all.max(1.0) * letters).round());
        let run: String = std::iter::repeat_n(letter, end - drawn).collect();
        drawn = end;
        bar.push_span(Span::styled(run, color));
        if bytes > 0 {
            legend.push_span(Span::styled(format!(" {letter} "), color));
            legend.push_span(format!("{name} {} ", size(bytes)));
        }
    }
    frame.render_widget(Text::from(vec![bar, legend]), area);
}

fn draw_detail(detail: &Detail, frame: &mut Frame, area: Rect) {
    let [curve, terms] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(36)]).areas(area);
    draw_curve(&detail.subject, frame, curve);
    let block = Block::bordered().title(format!(" {} ", name(detail.subject.name())));
    let inner = block.inner(terms);
    frame.render_widget(block, terms);
    let used = |sample: &Sample| sample.working_set_bytes;
    let uses: Vec<Option<u64>> = detail.samples.iter().map(used).collect();
    let spark = if uses.iter().any(Option::is_some) {
        2
    } else {
        0
    };
    let [terms, head, line] = Layout::vertical([
        Constraint::Min(1),
        Constraint::Length(spark / 2),
        Constraint::Length(spark),
    ])
    .areas(inner);
    let terms_of = Paragraph::new(Text::from(lines_of(&detail.subject))).wrap(Wrap { trim: true });
    frame.render_widget(terms_of, terms);
    frame.render_widget(Line::raw("what it used, last half hour").dim(), head);
    let newest = uses.len().saturating_sub(line.width.into());
    frame.render_widget(Sparkline::default().data(&uses[newest..]).cyan(), line);
}

/// Details of what is selected, the most important first.
fn lines_of(subject: &Subject) -> Vec<Line<'static>> {
    match subject {
        Subject::Vm(view) => lines(&view.summary),
        Subject::Group(view) => group_lines(&view.summary),
    }
}

fn group_lines(group: &GroupSummary) -> Vec<Line<'static>> {
    let limit = group.limit_bytes.map_or_else(|| "none".to_owned(), size);
    let mut lines = vec![
        Line::raw(format!("control group ({}): only observed", group.kind)),
        Line::raw(printable(&group.path)),
        Line::raw(format!(
            "charged {}, limit {limit}",
            maybe_size(group.charged_bytes)
        )),
        Line::raw(format!("uses {}", working_set(group.working_set.as_ref()))),
    ];
    lines.extend(group.trace.as_ref().map(trace_line));
    let warnings = group.warnings.iter();
    lines.extend(warnings.map(|warning| Line::raw(printable(warning)).yellow()));
    lines
}

fn trace_line(trace: &TraceView) -> Line<'static> {
    Line::raw(format!(
        "tracer {}, lost {}",
        name_of(trace.state),
        trace.lost
    ))
}

/// Details of a VM.
fn lines(vm: &VmSummary) -> Vec<Line<'static>> {
    let mut lines = vec![
        Line::from(vec![
            Span::styled(name_of(vm.status), style_of(vm.status)),
            Span::raw(": "),
            Span::raw(printable(&vm.why)),
        ]),
        Line::raw(format!("misses {}", relative(vm.relative.as_ref()))),
        Line::raw(format!(
            "own {}, cache {}",
            size(vm.direct_bytes),
            size(vm.cache_bytes)
        )),
        Line::raw(format!(
            "needs {}, promised {}",
            maybe_size(vm.promise_bytes),
            vm.settings.promise
        )),
        Line::raw(format!(
            "{} to {}, baseline {}",
            size(vm.settings.min_bytes),
            size(vm.settings.max_bytes),
            size(vm.settings.baseline_bytes)
        )),
    ];
    if let Some(state) = &vm.stopped {
        let stopped = format!("its CPUs do not run: {}", printable(state));
        lines.push(Line::raw(stopped).yellow());
    }
    if !vm.settings.managed {
        lines.push(Line::raw("not managed").yellow());
    }
    if let Some(balloon) = &vm.balloon {
        lines.push(Line::raw(format!("balloon {}", name_of(balloon.state))));
    }
    lines.extend(vm.trace.as_ref().map(trace_line));
    if vm.is_emulated() {
        lines.push(Line::raw("emulated (tcg)").dim());
    }
    lines
}

fn draw_curve(subject: &Subject, frame: &mut Frame, area: Rect) {
    let block = Block::bordered().title(" misses by size ");
    let curve = subject.curve().map(curve_of);
    let curve = match curve {
        Some(Ok(curve)) => curve,
        Some(Err(error)) => {
            frame.render_widget(Paragraph::new(error.to_string()).block(block), area);
            return;
        }
        None => {
            frame.render_widget(Paragraph::new("not known yet").block(block), area);
            return;
        }
    };
    let of = subject.sizes();
    let until = of.until(&curve);
    let now = of.now_bytes as f64;
    let baseline = of.baseline_bytes.map(|bytes| bytes as f64);
    let legend = baseline.map_or(" ┊ now ", |_| " ┊ now  ⡇ baseline ");
    let block = block
        .title_bottom(Line::raw(format!(" 0 to {} ", size(until))))
        .title_bottom(Line::raw(legend).right_aligned());
    let points = curve.misses.points();
    let sizes: Vec<f64> = std::iter::once(0.0)
        .chain(
            points
                .iter()
                .map(|point| point.size.to_bytes(curve.page_size) as f64),
        )
        .chain([until as f64])
        .collect();
    let level = |of: fn(&plimsoll_flow::CurvePoint) -> f64| -> Vec<f64> {
        let shown = points.iter().map(|point| match point.misses_nothing() {
            true => 0.0,
            false => of(point),
        });
        std::iter::once(1.0).chain(shown).collect()
    };
    let canvas = Canvas::default()
        .block(block)
        .marker(Marker::Braille)
        .x_bounds([0.0, (until as f64).max(1.0)])
        .y_bounds([0.0, 1.0])
        .paint(|context| {
            let mut steps = |levels: &[f64], color| {
                for (index, y) in levels.iter().copied().enumerate() {
                    let (from, to) = (sizes[index], sizes[index + 1].max(sizes[index]));
                    context.draw(&Stroke::new(from, y, to, y, color));
                    if let Some(next) = levels.get(index + 1) {
                        context.draw(&Stroke::new(to, y, to, *next, color));
                    }
                }
            };
            steps(&level(|point| point.low), Color::DarkGray);
            steps(&level(|point| point.high), Color::DarkGray);
            steps(&level(|point| point.miss_ratio), Color::Cyan);
            if let Some(baseline) = baseline {
                context.draw(&Stroke::new(baseline, 0.0, baseline, 1.0, Color::Yellow));
            }
            for tick in 0..8 {
                let y = f64::from(tick) / 8.0;
                context.draw(&Stroke::new(now, y, now, y + 0.04, Color::White));
            }
        });
    frame.render_widget(canvas, area);
}

fn draw_log(picture: &Picture, frame: &mut Frame, area: Rect) {
    let warnings = picture.host.warnings.iter().map(|warning| {
        Line::from(vec![
            Span::raw("! ").red().bold(),
            Span::raw(printable(warning)),
        ])
    });
    let decisions = picture.decisions.iter().map(|decision| {
        let state = Span::styled(
            format!("{} ", name_of(decision.state)),
            color_of(decision.state),
        );
        Line::from(vec![
            Span::raw(format!(
                "#{} {} {} ",
                decision.id,
                time_of_day(decision.unix_ms),
                name_of(decision.kind)
            )),
            state,
            Span::raw(printable(&decision.reason)),
        ])
    });
    let mut lines: Vec<Line> = warnings.chain(decisions).collect();
    if lines.is_empty() {
        lines.push(Line::raw("nothing was decided yet").dim());
    }
    let [head, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    frame.render_widget(Line::raw("decisions").bold(), head);
    frame.render_widget(Text::from(lines), rest);
}

fn color_of(state: State) -> Color {
    match state {
        State::Kept => Color::Green,
        State::RolledBack | State::Failed => Color::Red,
        State::Partly | State::Stopped => Color::Yellow,
        State::Moving | State::Checking | State::Proposed => Color::Cyan,
        State::Superseded => Color::DarkGray,
    }
}
