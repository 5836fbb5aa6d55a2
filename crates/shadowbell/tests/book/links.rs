//! Links between the pages of the book, and from the pages to files of the repository.

use crate::pages::{Page, book, root};
use std::path::{Component, Path, PathBuf};

/// A path without `..`.
fn cleaned(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for component in path.components() {
        if component == Component::ParentDir {
            cleaned.pop();
        } else {
            cleaned.push(component);
        }
    }
    cleaned
}

/// Broken links of a page. With `is_book`, links to files outside of the book are broken as well.
fn broken(page: &Page, is_book: bool) -> Vec<String> {
    let mut found = Vec::new();
    for link in page.links() {
        if link.starts_with("https://") {
            continue;
        }
        let mut bad = |why: &str| found.push(format!("{}: {link}: {why}", page.path.display()));
        let (path, anchor) = link.split_once('#').map_or((&*link, None), |(p, a)| (p, Some(a)));
        let directory = page.path.parent().unwrap_or(Path::new(""));
        let target =
            if path.is_empty() { page.path.clone() } else { cleaned(&directory.join(path)) };
        if !root().join(&target).exists() {
            bad("there is no such file");
        } else if is_book && !target.starts_with("docs") {
            bad("it is not in the book");
        } else if let Some(anchor) = anchor
            && target.extension().is_some_and(|extension| extension == "md")
        {
            let anchors =
                if path.is_empty() { page.anchors() } else { Page::open(target).anchors() };
            if !anchors.contains(anchor) {
                bad("there is no such heading");
            }
        }
    }
    found
}

#[test]
fn links_of_the_book_resolve() {
    let found: Vec<_> = book().iter().flat_map(|page| broken(page, true)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn links_of_the_repository_resolve() {
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    let crates = crates.map(|entry| Path::new("crates").join(entry.unwrap().file_name()));
    let readmes = crates.map(|path| path.join("README.md")).filter(|p| root().join(p).exists());
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
    let all = top.into_iter().map(Into::into).chain(readmes);
    let found: Vec<_> = all.flat_map(|path| broken(&Page::open(path), false)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_broken_link_is_found() {
    let page = |text: &str| Page { path: "docs/performance.md".into(), text: text.to_owned() };
    for (text, why) in [
        ("[a](missing.md)", "no such file"),
        ("[a](introduction.md#no-such)", "no such heading"),
        ("[a](#no-such)", "no such heading"),
        ("[a](../README.md)", "not in the book"),
    ] {
        let found = broken(&page(text), true);
        assert!(found.len() == 1 && found[0].contains(why), "{text}: {found:?}");
    }
    assert!(
        broken(&page("# B c\n[a](introduction.md) [b](#b-c) [c](https://example.org)"), true)
            .is_empty()
    );
}
