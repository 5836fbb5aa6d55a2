//! `shadowbell manual` and `shadowbell completions`: generate manual pages and shell completions.

use anyhow::Context;
use clap_complete::Shell;
use clap_mangen::Man;
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
    /// Output directory, for `man/shadowbell*.1` and `completions/` (bash, zsh, fish)
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
    pages(&command, &directory("man")?)?;
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
    let man = Man::new(command).manual("Shadowbell Manual");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
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
    Ok(page)
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
    fn special_characters_of_roff_are_escaped() {
        assert_eq!(literal(".SH a\\b --x"), "\\&.SH a\\eb \\-\\-x");
    }
}
