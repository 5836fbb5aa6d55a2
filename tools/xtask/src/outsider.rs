//! Whether somebody outside of the workspace can copy the programs of the guides: those of
//! README.md, of the crates' README.md, and of the docs at the top of their lib.rs and guide.rs.
//!
//! Each program becomes a binary of a package of its own under target/outsider, which depends on
//! the crates by their published names, and on nothing else.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use shadowbell_bench::workspace::{cargo, root};

/// A program of a guide.
#[derive(Debug, PartialEq)]
struct Block {
    /// Of the guide, from the root of the repository.
    guide: String,
    /// The line of the guide at which the program begins.
    line: usize,
    text: String,
}

impl Block {
    /// What its binary is called: `crates-driver-README-12`.
    fn name(&self) -> String {
        let guide = self.guide.rsplit_once('.').map_or(self.guide.as_str(), |(stem, _)| stem);
        format!("{}-{}", guide.replace('/', "-"), self.line)
    }

    /// The program, in a `main` if it has none, as rustdoc does it.
    fn program(&self) -> String {
        let text = &self.text;
        if text.contains("fn main(") {
            return text.clone();
        }
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        if last.starts_with("Ok::<") || last.starts_with("Ok(()") {
            let result = "Result<(), impl std::fmt::Debug>";
            return format!(
                "fn main() {{\nfn program() -> {result} {{\n{text}}}\nprogram().unwrap();\n}}\n"
            );
        }
        format!("fn main() {{\n{text}}}\n")
    }
}

/// Checks every program. The error names the guides and the lines of those that do not compile.
pub(crate) fn check() -> Result<()> {
    let (root, directory) = (root(), root().join("target/outsider"));
    let blocks = blocks(&root)?;
    ensure!(!blocks.is_empty(), "no README, lib.rs or guide.rs has a program");
    write_package(&root, &directory, &blocks)?;
    let output = cargo()
        .current_dir(&directory)
        // Not the workspace's: an outsider has none of its settings.
        .args(["check", "--quiet", "--bins", "--keep-going", "--message-format=json"])
        .arg("--target-dir")
        .arg(directory.join("target"))
        .stderr(Stdio::piped())
        .output()
        .context("cargo check")?;
    if output.status.success() {
        println!("   {} programs compile outside of the workspace", blocks.len());
        return Ok(());
    }
    let failures = failures(&blocks, &String::from_utf8_lossy(&output.stdout));
    if failures.is_empty() {
        bail!("cargo check: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    bail!("{}", failures.join("\n"))
}

/// The programs of all guides, in the order of their files.
fn blocks(root: &Path) -> Result<Vec<Block>> {
    let mut guides = vec![PathBuf::from("README.md")];
    let crates = fs::read_dir(root.join("crates")).context("crates")?;
    let mut names: Vec<_> = crates.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    for name in names {
        let path = Path::new("crates").join(name);
        guides.extend(["README.md", "src/lib.rs", "src/guide.rs"].map(|guide| path.join(guide)));
    }
    let mut blocks = Vec::new();
    for guide in guides.iter().filter(|guide| root.join(guide).is_file()) {
        let name = guide.display().to_string();
        let text = fs::read_to_string(root.join(guide)).with_context(|| name.clone())?;
        blocks.extend(blocks_of(&name, &text));
    }
    Ok(blocks)
}

/// The programs of one guide.
fn blocks_of(guide: &str, text: &str) -> Vec<Block> {
    let is_source = guide.ends_with(".rs");
    let mut blocks = Vec::new();
    // The block that has begun, and whether it is a program.
    let mut open: Option<(Block, bool)> = None;
    for (index, line) in text.lines().enumerate() {
        let line = match (is_source, line.strip_prefix("//!")) {
            (true, Some(doc)) => doc.strip_prefix(' ').unwrap_or(doc),
            (true, None) => continue,
            (false, _) => line,
        };
        let fence = line.trim_start().strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(words)) => {
                let block = Block { guide: guide.to_owned(), line: index + 2, text: String::new() };
                open = Some((block, is_program(words, is_source)));
            }
            (Some(_), Some(_)) => {
                blocks.extend(open.take().filter(|(_, program)| *program).map(|(block, _)| block));
            }
            (Some((block, _)), None) => {
                // What rustdoc hides.
                let shown = line.strip_prefix("# ").or((line == "#").then_some(""));
                block.text += shown.unwrap_or(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Whether the words behind a fence say that a program follows; none of them means Rust to rustdoc.
fn is_program(words: &str, is_source: bool) -> bool {
    let words: Vec<_> = words.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    let is_rust = words.contains(&"rust")
        || is_source && words.iter().all(|word| ["no_run", "should_panic"].contains(word));
    is_rust && !words.iter().any(|word| ["ignore", "compile_fail"].contains(word))
}

/// Writes the package anew.
fn write_package(root: &Path, directory: &Path, blocks: &[Block]) -> Result<()> {
    let programs = directory.join("src/bin");
    if programs.exists() {
        fs::remove_dir_all(&programs).context("target/outsider")?;
    }
    fs::create_dir_all(&programs).context("target/outsider")?;
    let used: BTreeSet<&str> = blocks.iter().flat_map(|block| crates_of(&block.text)).collect();
    let manifest = manifest(root, &used)?;
    fs::write(directory.join("Cargo.toml"), manifest).context("target/outsider/Cargo.toml")?;
    // The same versions of everything else.
    fs::copy(root.join("Cargo.lock"), directory.join("Cargo.lock")).context("Cargo.lock")?;
    for block in blocks {
        let file = programs.join(block.name() + ".rs");
        fs::write(&file, block.program()).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// The crates of the workspace that a program names.
fn crates_of(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("shadowbell_"))
}

fn manifest(root: &Path, used: &BTreeSet<&str>) -> Result<String> {
    let mut text = String::from(
        "[package]\nname = \"outsider\"\nedition = \"2024\"\npublish = false\n\n[workspace]\n\n\
         [dependencies]\n",
    );
    for name in used {
        let short = name.trim_start_matches("shadowbell_").replace('_', "-");
        let path = root.join("crates").join(&short);
        ensure!(path.is_dir(), "a program uses {name}, and there is no crate crates/{short}");
        writeln!(text, "shadowbell-{short} = {{ path = {:?} }}", path.display().to_string())?;
    }
    Ok(text)
}

/// A sentence for each program with errors, and what the compiler said.
fn failures(blocks: &[Block], messages: &str) -> Vec<String> {
    let mut failures: Vec<String> = Vec::new();
    for message in messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str);
        if text("/message/level") != Some("error") {
            continue;
        }
        let said = text("/message/rendered").unwrap_or_default().trim_end();
        let block = blocks.iter().find(|block| Some(block.name().as_str()) == text("/target/name"));
        failures.push(match block {
            Some(Block { guide, line, .. }) => format!(
                "the program at line {line} of {guide} does not compile outside of the workspace:\n\
                 {said}"
            ),
            None => said.to_owned(),
        });
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_where_a_reader_sees_them() {
        let guide = "# Title\n\n```sh\ncargo run\n```\n\n```rust\nfn main() {}\n```\n\
                     ```rust,ignore\nx\n```\n```\nplain\n```\n";
        let blocks = blocks_of("README.md", guide);
        let text = "fn main() {}\n".to_owned();
        assert_eq!(blocks, [Block { guide: "README.md".into(), line: 8, text }]);
        assert_eq!(blocks[0].name(), "README-8");
        let source = "//! Docs.\n//!\n//! ```no_run\n//! # use a::B;\n//! let b = B;\n//!\n//! ```\n\
                      //! ```text\n//! no\n//! ```\n/// ```\n/// an item's\n/// ```\n";
        let blocks = blocks_of("crates/a/src/lib.rs", source);
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].text, "use a::B;\nlet b = B;\n\n");
        assert_eq!(blocks[0].name(), "crates-a-src-lib-4");
    }

    #[test]
    fn a_program_without_a_main_gets_one() {
        let program =
            |text: &str| Block { guide: "README.md".into(), line: 1, text: text.into() }.program();
        assert_eq!(program("fn main() {}\n"), "fn main() {}\n");
        assert_eq!(program("a();\n"), "fn main() {\na();\n}\n");
        assert!(program("a()?;\nOk::<(), E>(())\n").contains("-> Result<(), impl"));
    }

    #[test]
    fn an_error_names_the_guide_and_the_line() {
        let block = Block { guide: "README.md".into(), line: 8, text: String::new() };
        let message =
            r#"{"target":{"name":"README-8"},"message":{"level":"error","rendered":"no B"}}"#;
        let failures = failures(&[block], message);
        assert_eq!(failures.len(), 1);
        assert!(failures[0].contains("line 8 of README.md") && failures[0].contains("no B"));
    }

    #[test]
    fn the_crates_that_are_named_are_depended_on() {
        let text = "use shadowbell_driver::Driver; use shadowbell_backend_nvme as b;";
        assert_eq!(
            crates_of(text).collect::<Vec<_>>(),
            ["shadowbell_driver", "shadowbell_backend_nvme"]
        );
        let text = manifest(&root(), &BTreeSet::from(["shadowbell_backend_nvme"])).unwrap();
        assert!(text.contains("shadowbell-backend-nvme = { path = "), "{text}");
        assert!(manifest(&root(), &BTreeSet::from(["shadowbell_nothing"])).is_err());
    }
}
