//! `shadowbell manual` and `shadowbell completions`: generate manual pages and shell completions.
//!
//! shadowbell.toml(5) and shadowbell-disks(7) are generated from the types that read the
//! configuration file, and from the table of the kinds of disks.

use anyhow::Context;
use clap::Arg;
use clap_complete::Shell;
use clap_mangen::Man;
use shadowbell_config::config_file::reference;
use shadowbell_storage::disk_reference::{self, OptionReference};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Shells for which completions are generated.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Text width of a page without its margin.
const WIDTH: usize = 73;

/// Write manual pages and shell completions to a directory
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Output directory, for `man/shadowbell*` and `completions/` (bash, zsh, fish)
    directory: PathBuf,
}

/// Print the completions for a shell: `shadowbell completions bash`
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions for `command`, the program's command line.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn completions(
    args: &CompletionArgs,
    mut command: clap::Command,
) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "shadowbell", &mut text);
    io::stdout().lock().write_all(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the verb for `command`, the program's command line.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn run(args: &Args, mut command: clap::Command) -> anyhow::Result<ExitCode> {
    // Fills in the names and usages of all subcommands.
    command.build();
    let directory = |name: &str| {
        let path = args.directory.join(name);
        fs::create_dir_all(&path).with_context(|| path.display().to_string()).map(|()| path)
    };
    let pages_directory = directory("man")?;
    pages(&command, &pages_directory)?;
    for (name, page) in [("shadowbell.toml.5", toml_page()), ("shadowbell-disks.7", disks_page())] {
        let path = pages_directory.join(name);
        fs::write(&path, page).with_context(|| path.display().to_string())?;
    }
    let completions = directory("completions")?;
    for shell in SHELLS {
        let written = clap_complete::generate_to(shell, &mut command, "shadowbell", &completions);
        written.with_context(|| completions.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command and of its subcommands.
fn pages(command: &clap::Command, directory: &Path) -> anyhow::Result<()> {
    let shown = |below: &&clap::Command| !below.is_hide_set() && below.get_name() != "help";
    command.get_subcommands().filter(shown).try_for_each(|below| pages(below, directory))?;
    let path = directory.join(format!("{}.1", page_name(command)));
    let page = page(command.clone()).context("a manual page")?;
    fs::write(&path, page).with_context(|| path.display().to_string())
}

fn page_name(command: &clap::Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).replace(' ', "-")
}

fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let has_verbs = command.get_subcommands().any(|below| !below.is_hide_set());
    let notes = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    let (synopsis, see_also) = (synopsis(&command), see_also(&command));
    let man = Man::new(command).manual(MANUAL);
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    page.extend(synopsis.into_bytes());
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if has_verbs {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(notes) = notes {
        writeln!(page, ".SH NOTES\n.nf")?;
        for line in notes.lines() {
            // A paragraph is one long line. Shorter lines belong to files, tables and commands, and
            // are not filled.
            let is_paragraph = line.len() > WIDTH && !line.starts_with(' ');
            let line = literal(line);
            if is_paragraph {
                writeln!(page, ".fi\n{line}\n.nf")?;
            } else {
                writeln!(page, "{line}")?;
            }
        }
        writeln!(page, ".fi")?;
    }
    page.extend(see_also.into_bytes());
    Ok(page)
}

/// Title of the manual, in the header of each page.
const MANUAL: &str = "Shadowbell Manual";

/// Section with the grammar of a command: its options and arguments, with their values.
fn synopsis(command: &clap::Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let mut text = format!(".SH SYNOPSIS\n\\fB{}\\fR", literal(name));
    let shown =
        |arg: &&Arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str());
    let (positional, options): (Vec<_>, Vec<_>) =
        command.get_arguments().filter(shown).partition(|arg| arg.is_positional());
    for arg in options.into_iter().chain(positional) {
        let form = form(arg);
        let _ = match arg.is_required_set() {
            true => write!(text, "\n{form}"),
            false => write!(text, "\n[{form}]"),
        };
        if matches!(arg.get_action(), clap::ArgAction::Append | clap::ArgAction::Count)
            || arg.get_num_args().is_some_and(|count| count.max_values() > 1)
        {
            text += "...";
        }
    }
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        text += "\n\\fICOMMAND\\fR ...";
    }
    text + "\n"
}

/// Option or argument with its value: the name of the value, or the words that are permitted.
fn form(arg: &Arg) -> String {
    let words: Vec<_> = arg
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("\\fB{}\\fR", literal(value.get_name())))
        .collect();
    let names = arg.get_value_names().into_iter().flatten();
    let names: Vec<_> = names.map(|name| format!("\\fI{}\\fR", literal(name))).collect();
    let value = if words.is_empty() { names.join(" ") } else { words.join("|") };
    let name = arg.get_long().map(|long| format!("--{long}"));
    let name = name.or_else(|| arg.get_short().map(|short| format!("-{short}")));
    match name.map(|name| format!("\\fB{}\\fR", literal(&name))) {
        None => value,
        Some(name) if arg.get_action().takes_values() => format!("{name} {value}"),
        Some(name) => name,
    }
}

/// Section with the pages that belong to a command.
fn see_also(command: &clap::Command) -> String {
    let name = page_name(command);
    let pages: &[_] = match &name[..] {
        "shadowbell" => &["shadowbell-serve(1)", "shadowbell.toml(5)", "shadowbell-disks(7)"],
        "shadowbell-serve" | "shadowbell-config-check" | "shadowbell-ctl-apply" => {
            &["shadowbell(1)", "shadowbell.toml(5)", "shadowbell-disks(7)"]
        }
        _ => &["shadowbell(1)", "shadowbell-disks(7)"],
    };
    format!(".SH \"SEE ALSO\"\n{}\n", literal(&pages.join(", ")))
}

/// Begin of a page that is not of a command.
fn title(name: &str, section: u8, purpose: &str) -> String {
    format!(
        ".TH {} {section} \"\" \"shadowbell {}\" \"{MANUAL}\"\n.SH NAME\n{} \\- {}\n",
        literal(name),
        env!("CARGO_PKG_VERSION"),
        literal(name),
        literal(purpose)
    )
}

/// Entry of a list: a term in bold, and its text.
fn entry(term: &str, value: &str, text: &str) -> String {
    format!(".TP\n\\fB{}\\fR{}\n{}\n", literal(term), literal(value), literal(text))
}

/// Page shadowbell.toml(5).
fn toml_page() -> String {
    let mut page = title("shadowbell.toml", 5, "configuration file of shadowbell serve");
    page += ".SH DESCRIPTION\n";
    page += &literal(
        "A file in TOML for `shadowbell serve --config FILE`. Relative paths start at the directory \
         in which the server was started. `shadowbell config check FILE` checks a file; `shadowbell \
         ctl apply FILE` and SIGHUP apply changes of controllers, disks, exports and limit groups to \
         a running server. Other settings count from the next `shadowbell upgrade` or start on. An \
         example is in shadowbell-serve(1).",
    );
    page.push('\n');
    for table in reference::tables() {
        let name = if table.name.is_empty() { "SERVER" } else { table.name };
        let _ = write!(page, ".SH \"{}\"\n{}\n", literal(name), literal(table.text));
        for key in table.keys {
            let required = if key.is_required { ", required" } else { "" };
            page += &entry(&key.name, &format!(" ({}{required})", key.form), &key.text);
        }
    }
    page += ".SH \"SEE ALSO\"\n";
    page + &literal("shadowbell-serve(1), shadowbell-disks(7), shadowbell-config-check(1)") + "\n"
}

/// Page shadowbell-disks(7).
fn disks_page() -> String {
    let mut page = title("shadowbell-disks", 7, "disks of shadowbell: kinds and options");
    page += ".SH SYNOPSIS\n";
    page += &literal("[SCHEME:]NAME[?OPTION=VALUE[&OPTION=VALUE]...]");
    page += "\n.SH DESCRIPTION\n";
    page += &literal(
        "The storage of a namespace or export, as in `/srv/vm0.img?direct=on&iops=1000`. A NAME \
         without a scheme is the path of a file or device. A SIZE is a number of bytes, also with a \
         unit: 64KiB, 10GiB. A TIME is a number of seconds, also with a unit: 500ms, 2s.",
    );
    page.push('\n');
    let options = |page: &mut String, options: &[OptionReference]| {
        for OptionReference { name, value, text } in options {
            *page += &entry(&format!("{name}="), value, text);
        }
    };
    for kind in disk_reference::kinds() {
        let _ = write!(page, ".SH \"{} DISKS\"\n.nf\n", literal(&kind.name.to_uppercase()));
        for form in kind.forms {
            let _ = writeln!(page, "{}", literal(form));
        }
        let _ = write!(page, ".fi\n.PP\n{}\n", literal(kind.text));
        options(&mut page, &kind.options);
    }
    page += ".SH \"OPTIONS OF ALL DISKS\"\n";
    options(&mut page, &disk_reference::common_options());
    page += ".SH \"SEE ALSO\"\n";
    page + &literal("shadowbell-serve(1), shadowbell.toml(5)") + "\n"
}

/// Escapes a line for roff.
fn literal(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_a_command_has_its_grammar() {
        let mut command = crate::cli::command();
        command.build();
        let serve = command.find_subcommand("serve").unwrap().clone();
        let page = String::from_utf8(page(serve).unwrap()).unwrap();
        for words in [
            ".SH SYNOPSIS\n\\fBshadowbell serve\\fR\n",
            "\n[\\fB\\-\\-socket\\fR \\fIPATH\\fR]\n",
            "\n[\\fB\\-\\-poll\\fR \\fBadaptive\\fR|\\fBalways\\fR|\\fBnever\\fR]\n",
            "\n[\\fIDISK\\fR]...\n",
            "\n[\\fB\\-\\-measure\\fR]\n",
            "default: 5]",
            "Examples:\n",
            "shadowbell.toml(5)",
        ] {
            assert!(page.contains(words), "{words}\n{page}");
        }
    }

    #[test]
    fn the_pages_of_files_and_disks_have_all_keys_and_options() {
        let page = toml_page();
        for table in reference::tables() {
            for key in table.keys {
                let term = format!(".TP\n\\fB{}\\fR ({}", literal(&key.name), key.form);
                assert!(page.contains(&term), "{term}");
            }
        }
        assert!(page.contains(".SH \"[[controller]]\"\n"), "{page}");
        let page = disks_page();
        for kind in disk_reference::kinds() {
            for form in kind.forms {
                assert!(page.contains(&literal(form)), "{form}");
            }
        }
        for (option, _) in disk_reference::all_options() {
            let term = format!(".TP\n\\fB{}\\fR", literal(&format!("{}=", option.name)));
            assert!(page.contains(&term), "{term}");
        }
    }

    #[test]
    fn special_characters_of_roff_are_escaped() {
        assert_eq!(literal(".SH a\\b --x"), "\\&.SH a\\eb \\-\\-x");
    }
}
