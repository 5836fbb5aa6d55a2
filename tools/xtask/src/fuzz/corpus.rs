//! Corpus of a fuzz target: programs in `fuzz/corpus/TARGET` that together reach all coverage that
//! was ever found.
//!
//! The corpus is in the repository. A run starts from it, writes new programs to a temporary
//! directory, and then replaces the corpus by a minimised set of both. Programs that were added by
//! hand have a name that describes them, and are never removed; all others have the name that
//! libFuzzer gives them, the SHA-1 hash of their content.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use shadowbell_bench::workspace::root;

/// Number of programs in the initial corpus, and their size in bytes.
const FIRST: u64 = 64;
const FIRST_BYTES: u64 = 1500;
/// Maximum size of the generated programs of one target in bytes. All corpora together have at most
/// 16 MiB.
const MAX_BYTES: u64 = 1 << 20;

/// Directory of a target's corpus.
pub(super) fn directory(target: &str) -> PathBuf {
    root().join("fuzz/corpus").join(target)
}

/// True if a program was added by hand.
fn is_named(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.len() != 40 || !name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Programs in a directory, in the order of their names.
fn programs(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> = files.map(|file| file.path()).filter(|path| path.is_file()).collect();
    paths.sort();
    paths
}

/// Creates a temporary directory for new programs of a target. If the target has no corpus, the
/// directory gets pseudo-random programs to start from.
pub(super) fn working_directory(target: &str) -> Result<tempfile::TempDir> {
    let parent = root().join("target/fuzz");
    fs::create_dir_all(&parent).with_context(|| parent.display().to_string())?;
    fs::create_dir_all(directory(target))?;
    let working = tempfile::Builder::new().prefix(target).tempdir_in(parent)?;
    if programs(&directory(target)).is_empty() {
        create_programs(working.path())?;
    }
    Ok(working)
}

/// Writes pseudo-random programs to a directory.
fn create_programs(directory: &Path) -> Result<()> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for number in 0..FIRST {
        let len = 50 + next() % FIRST_BYTES;
        let bytes: Vec<u8> = (0..len).map(|_| (next() >> 32) as u8).collect();
        fs::write(directory.join(format!("first-{number}")), bytes)?;
    }
    Ok(())
}

/// Replaces the generated programs in `corpus` by those in `minimised`, which has no others than
/// generated ones. If they exceed the limit, the longest are left out. Returns the number of
/// programs and of bytes.
pub(super) fn replace(corpus: &Path, minimised: &Path) -> Result<(usize, u64)> {
    replace_within(corpus, minimised, MAX_BYTES)
}

fn replace_within(corpus: &Path, minimised: &Path, limit: u64) -> Result<(usize, u64)> {
    let (named, generated): (Vec<_>, Vec<_>) =
        programs(corpus).into_iter().partition(|path| is_named(path));
    let named: Vec<_> = named.iter().map(fs::read).collect::<Result<_, _>>()?;
    let mut new = Vec::new();
    for path in programs(minimised) {
        let bytes = fs::read(&path)?;
        if !named.contains(&bytes) {
            new.push((bytes.len() as u64, path, bytes));
        }
    }
    new.sort();
    generated.iter().try_for_each(fs::remove_file)?;
    let (mut count, mut size) = (0, 0);
    for (len, path, bytes) in new {
        if size + len > limit {
            break;
        }
        let name = path.file_name().context("a program without a name")?;
        fs::write(corpus.join(name), bytes)?;
        (count, size) = (count + 1, size + len);
    }
    Ok((count, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name that libFuzzer could give to a program.
    fn hash(digit: char) -> String {
        std::iter::repeat_n(digit, 40).collect()
    }

    #[test]
    fn generated_programs_are_replaced_and_named_ones_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (corpus, new) = (directory.path().join("corpus"), directory.path().join("new"));
        for (at, name, bytes) in [
            (&corpus, "an-overflow".to_owned(), &b"named"[..]),
            (&corpus, hash('a'), b"old"),
            (&new, hash('b'), b"a longer one"),
            (&new, hash('c'), b"short"),
            (&new, hash('d'), b"named"),
        ] {
            fs::create_dir_all(at).unwrap();
            fs::write(at.join(name), bytes).unwrap();
        }
        let names = || -> Vec<String> {
            let names = programs(&corpus).into_iter();
            names.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(replace_within(&corpus, &new, 100).unwrap(), (2, 17));
        assert_eq!(names(), ["an-overflow".to_owned(), hash('b'), hash('c')]);
        // The longest program is left out if there is no room for it.
        assert_eq!(replace_within(&corpus, &new, 16).unwrap(), (1, 5));
        assert_eq!(names(), ["an-overflow".to_owned(), hash('c')]);
    }

    #[test]
    fn the_corpus_in_the_repository_is_within_its_limit() {
        let mut all = 0;
        for directory in fs::read_dir(root().join("fuzz/corpus")).unwrap().flatten() {
            let size = |path: &PathBuf| fs::metadata(path).unwrap().len();
            all += programs(&directory.path()).iter().map(size).sum::<u64>();
        }
        assert!(all <= 16 << 20, "{all} bytes");
    }
}
