//! The reference has each setting of a configuration file and each option of a disk.

use crate::pages::root;
use shadowbell_process::exit::ExitStatus;
use std::collections::BTreeSet;
use std::process::Command;

/// Help of `shadowbell serve`.
fn help() -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
    let output = command.args(["serve", "--help"]).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// The reference has the table of exit statuses, and the packaged units do not restart a service
/// that has ended because of unusable input.
#[test]
fn the_exit_statuses_are_those_of_the_program() {
    let page = std::fs::read_to_string(root().join("docs/reference/exit-status.md")).unwrap();
    for status in ExitStatus::ALL {
        let row = format!("| {} | {} |", status as u8, status.meaning());
        assert!(page.lines().any(|line| line == row), "{row}");
    }
    for unit in ["shadowbell.service", "shadowbell@.service"] {
        let text = std::fs::read_to_string(root().join("packaging").join(unit)).unwrap();
        let line = format!("RestartPreventExitStatus={}", ExitStatus::BadInput as u8);
        assert!(text.lines().any(|other| other == line), "{unit}");
    }
}

/// Part of the help between a line that begins with `from` and one that begins with `to`.
fn part<'a>(help: &'a str, from: &str, to: &str) -> &'a str {
    let from = help.split_once(&format!("\n{from}")).unwrap().1;
    from.split_once(&format!("\n{to}")).unwrap().0
}

/// Names before a `=` in a text, without those in quotes and comments.
fn names(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default();
        let plain: String = line.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        for (at, _) in plain.match_indices('=') {
            let before = plain[..at].trim_end();
            let is_name = |c: char| c.is_ascii_lowercase() || c == '-';
            let name = before.rsplit(|c| !is_name(c)).next().unwrap_or_default();
            if !name.is_empty() {
                found.insert(name.to_owned());
            }
        }
    }
    found
}

#[test]
fn every_setting_of_the_help_is_in_the_reference() {
    let help = help();
    let pages = |paths: &[&str]| {
        let text = |path: &&str| std::fs::read_to_string(root().join("docs").join(path)).unwrap();
        paths.iter().map(text).collect::<String>()
    };
    let settings = names(part(&help, "A configuration file:", "A file with"));
    assert!(settings.len() > 20, "{settings:?}");
    let page = pages(&["reference/config.md"]);
    let keys = shadowbell_config::config_file::reference::tables().into_iter();
    let keys = keys.flat_map(|table| table.keys).map(|key| key.name);
    let settings: BTreeSet<_> = settings.into_iter().chain(keys).collect();
    let missing: Vec<_> =
        settings.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "not in reference/config.md: {missing:?}");

    // Names of options are in the first column only.
    let options = part(&help, "Options of a disk", "A configuration file:");
    let first = |line: &str| line.starts_with("  ") && !line.starts_with("   ");
    let columns = options.lines().filter(|line| first(line));
    let columns = columns.map(|line| line.trim().split("  ").next().unwrap_or_default());
    let options = names(&columns.collect::<Vec<_>>().join("\n"));
    assert!(options.len() > 15, "{options:?}");
    let page = pages(&[
        "disks/index.md",
        "disks/files.md",
        "disks/qcow2.md",
        "disks/nbd.md",
        "disks/ceph.md",
        "disks/nvme.md",
        "disks/metadata-and-zones.md",
        "guides/limits.md",
    ]);
    let missing: Vec<_> = options.iter().filter(|name| !page.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "in no page of disks: {missing:?}");
}
