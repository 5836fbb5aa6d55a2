//! Display of `top` on a terminal: a table that fits 80 columns, and key bindings.

use super::rates::{NamespaceRates, Rates, or_none, percent, time};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table, TableState};
use shadowbell_process::units::{bandwidth, count, per_io};
use std::io;
use std::time::Instant;

/// Headings and widths of the columns after the first one in the view of the workload.
const WORK: [(&str, u16); 7] = [
    ("State", 7),
    ("Waits for", 10),
    ("IOPS", 7),
    ("Read", 10),
    ("Written", 10),
    ("p50", 8),
    ("p99", 8),
];
/// Headings and widths of the columns after the first one in the view of doorbells.
const DOORBELLS: [(&str, u16); 7] = [
    ("Errors", 6),
    ("Workers", 7),
    ("Queues", 6),
    ("IOPS", 7),
    ("Rings/IO", 8),
    ("Saved", 7),
    ("Intr/IO", 8),
];

/// State of the display: data, selected line, and view.
#[derive(Debug, Default)]
pub(super) struct Screen {
    rates: Vec<Rates>,
    state: TableState,
    shows_doorbells: bool,
}

/// Effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    /// Continue.
    Nothing,
    /// End the program.
    End,
}

impl Screen {
    /// Replaces the data. The selected line stays selected.
    pub(super) fn set(&mut self, rates: Vec<Rates>) {
        self.rates = rates;
        self.select(self.state.selected().unwrap_or(0));
    }

    fn lines(&self) -> usize {
        self.rates.iter().map(|rates| 1 + rates.namespaces.len()).sum()
    }

    fn select(&mut self, line: usize) {
        self.state.select(self.lines().checked_sub(1).map(|last| line.min(last)));
    }

    /// Handles keys until the time `until`, and redraws after each of them.
    ///
    /// # Errors
    /// The terminal fails.
    pub(super) fn wait(
        &mut self,
        until: Instant,
        mut draw: impl FnMut(&mut Self) -> io::Result<()>,
    ) -> io::Result<KeyAction> {
        loop {
            draw(self)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !event::poll(left)? {
                return Ok(KeyAction::Nothing);
            }
            if let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && self.key(key) == KeyAction::End
            {
                return Ok(KeyAction::End);
            }
        }
    }

    fn key(&mut self, key: KeyEvent) -> KeyAction {
        let at = self.state.selected().unwrap_or(0);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::End,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return KeyAction::End;
            }
            KeyCode::Up | KeyCode::Char('k') => self.select(at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(at + 1),
            KeyCode::PageUp => self.select(at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.select(at + PAGE),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Left | KeyCode::Right | KeyCode::Char('d') | KeyCode::Tab => {
                self.shows_doorbells = !self.shows_doorbells;
            }
            _ => {}
        }
        KeyAction::Nothing
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]);
        let [above, below] = areas.areas(frame.area());
        let columns = if self.shows_doorbells { DOORBELLS } else { WORK };
        // Each column is followed by a gap of one character.
        let others: u16 = columns.iter().map(|(_, width)| width + 1).sum();
        let first = frame.area().width.saturating_sub(others);
        let mut rows = Vec::new();
        for rates in &self.rates {
            let bold = Style::new().add_modifier(Modifier::BOLD);
            let cells = if self.shows_doorbells { doorbells(rates) } else { work(rates) };
            rows.push(row(end_of(&rates.title(), first), cells, &columns).style(bold));
            for namespace in &rates.namespaces {
                let cells = if self.shows_doorbells {
                    let mut cells: [String; 7] = Default::default();
                    cells[0] = namespace.errors.to_string();
                    cells
                } else {
                    work_of_namespace(namespace)
                };
                let nsid = namespace.nsid.to_string();
                let left = first.saturating_sub(nsid.len() as u16 + 3);
                let title = format!("  {nsid} {}", end_of(&namespace.disk, left));
                rows.push(row(title, cells, &columns));
            }
        }
        let headings = columns.map(|(heading, _)| heading.to_owned());
        let header = row("Controller".to_owned(), headings, &columns);
        let widths = std::iter::once(first).chain(columns.map(|(_, width)| width));
        let table = Table::new(rows, widths.map(Constraint::Length))
            .header(header.style(Style::new().add_modifier(Modifier::UNDERLINED)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
            .column_spacing(1);
        frame.render_stateful_widget(table, above, &mut self.state);
        let measured = self.rates.iter().any(|rates| !rates.namespaces.is_empty());
        let hint = if measured || self.rates.is_empty() {
            ""
        } else {
            "   `shadowbell ctl measure on`: namespaces, p50"
        };
        let keys = format!("q quit   arrows move   d doorbells{hint}");
        frame
            .render_widget(Line::from(keys).style(Style::new().add_modifier(Modifier::DIM)), below);
    }
}

/// Lines of a page, for the keys Page Up and Page Down.
const PAGE: usize = 20;

fn row(title: String, cells: [String; 7], columns: &[(&str, u16); 7]) -> Row<'static> {
    let cells = cells.into_iter().zip(columns).map(|(cell, (heading, width))| {
        // Numbers are right-aligned, as their headings are.
        let is_word = matches!(*heading, "State" | "Waits for");
        let width = usize::from(*width);
        if is_word { cell } else { format!("{cell:>width$}") }
    });
    Row::new(std::iter::once(title).chain(cells))
}

/// Shortens a path to `width` characters. The end of the path is kept, because it distinguishes the
/// path from others.
fn end_of(path: &str, width: u16) -> String {
    let width = usize::from(width);
    let count = path.chars().count();
    if count <= width {
        return path.to_owned();
    }
    let rest: String = path.chars().skip(count + 1 - width.max(1)).collect();
    format!("\u{2026}{rest}")
}

fn work(rates: &Rates) -> [String; 7] {
    [
        rates.state.to_owned(),
        rates.waits_for(),
        count(rates.iops),
        bandwidth(rates.read),
        bandwidth(rates.written),
        or_none(rates.p50.map(time)),
        or_none(rates.p99.map(time)),
    ]
}

fn work_of_namespace(rates: &NamespaceRates) -> [String; 7] {
    [
        String::new(),
        String::new(),
        count(rates.iops),
        bandwidth(rates.read),
        bandwidth(rates.written),
        or_none(rates.p50.map(time)),
        or_none(rates.p99.map(time)),
    ]
}

fn doorbells(rates: &Rates) -> [String; 7] {
    let workers: Vec<_> = rates.workers.iter().map(ToString::to_string).collect();
    [
        rates.errors.to_string(),
        or_none((!workers.is_empty()).then(|| workers.join(","))),
        rates.queues.to_string(),
        count(rates.iops),
        or_none(rates.rings.map(per_io)),
        or_none(rates.saved.map(percent)),
        or_none(rates.interrupts.map(per_io)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use shadowbell_control_api::live_stats::{NamespaceRow, Row as Counters};

    fn rates(socket: &str, namespaces: u32) -> Rates {
        let namespace = |nsid| NamespaceRow {
            nsid,
            disk: format!("/var/lib/libvirt/images/a-machine-with-a-long-name/disk{nsid}.img"),
            ..NamespaceRow::default()
        };
        let before = Counters {
            socket: socket.into(),
            namespaces: (1..=namespaces).map(namespace).collect(),
            ..Counters::default()
        };
        let mut now = before.clone();
        (now.commands, now.bytes_read, now.bytes_written) = (1_234_567, 5 << 30, 999 << 20);
        (now.updates, now.rings, now.interrupts, now.queues) = (1_000_000, 3, 40_000, 8);
        now.workers = vec![0, 1];
        (now.waits.limit_ns, now.waits.disk_ns) = (60, 40);
        for namespace in &mut now.namespaces {
            namespace.commands = 600_000;
            namespace.bytes_read = 2 << 30;
            let mut latency = vec![0; 192];
            (latency[10], latency[100]) = (590_000, 10_000);
            namespace.latency = latency;
        }
        Rates::between(&before, &now, 1.0)
    }

    /// Lines of the display at this terminal size.
    fn lines(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> KeyAction {
        screen.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn the_display_fits_eighty_columns() {
        let mut screen = Screen::default();
        screen
            .set(vec![rates("/run/shadowbell/vm0.sock", 2), rates("/run/a/long/path/vm1.sock", 0)]);
        let shown = lines(&mut screen, 80, 24);
        assert_eq!(
            shown[0],
            "Controller    State   Waits for     IOPS       Read    Written      p50      p99"
        );
        assert_eq!(
            shown[1],
            "\u{2026}ell/vm0.sock busy    limit 60%   1.23 M 5.00 GiB/s  999 MiB/s  2.82 us  6.82 ms"
        );
        assert!(
            shown[2].starts_with("  1 \u{2026}") && shown[2].contains("isk1.img "),
            "{shown:#?}"
        );
        assert!(shown[2].ends_with("2.82 us  6.82 ms"), "{shown:#?}");
        assert!(shown[4].contains("vm1.sock busy") && shown[4].contains(" - "), "{shown:#?}");
        assert!(shown[23].starts_with("q quit"), "{shown:#?}");
        assert_eq!(press(&mut screen, KeyCode::Char('d')), KeyAction::Nothing);
        let shown = lines(&mut screen, 80, 24);
        assert!(shown[0].ends_with("IOPS Rings/IO   Saved  Intr/IO"), "{shown:#?}");
        assert!(shown[1].ends_with("1.23 M  <0.0001 100.0 %     0.03"), "{shown:#?}");
        assert!(shown[0].contains(" Errors Workers"), "{shown:#?}");
        // A tiny terminal must not cause a panic.
        lines(&mut screen, 10, 2);
    }

    #[test]
    fn arrows_scroll_and_q_quits() {
        let mut screen = Screen::default();
        assert_eq!(press(&mut screen, KeyCode::Down), KeyAction::Nothing);
        screen.set((0..40).map(|n| rates(&format!("/run/vm{n}.sock"), 1)).collect());
        assert!(lines(&mut screen, 80, 10)[1].starts_with("/run/vm0.sock"));
        for _ in 0..20 {
            press(&mut screen, KeyCode::Down);
        }
        let shown = lines(&mut screen, 80, 10);
        assert!(shown[8].starts_with("…un/vm10.sock"), "{shown:#?}");
        press(&mut screen, KeyCode::End);
        assert!(lines(&mut screen, 80, 10)[8].contains("isk1.img"));
        // If lines disappear, the selection moves to the last line.
        screen.set(vec![rates("/run/vm0.sock", 0)]);
        assert!(lines(&mut screen, 80, 10)[1].starts_with("/run/vm0.sock"));
        press(&mut screen, KeyCode::Up);
        screen.set(Vec::new());
        lines(&mut screen, 80, 10);
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert_eq!(press(&mut screen, code), KeyAction::End);
        }
        let end = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.key(end), KeyAction::End);
        assert_eq!(press(&mut screen, KeyCode::Char('c')), KeyAction::Nothing);
    }
}
