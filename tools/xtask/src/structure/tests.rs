//! Tests with small made-up crates.

use std::fs;

use tempfile::TempDir;

use super::cycles::Arrows;
use super::modules::{Target, Tree};
use super::packages::{misplaced, packages};
use super::{cycles, imports};

/// Graph of the imports of files with these contents. The first file is the root.
fn arrows(files: &[(&str, &str)]) -> Arrows {
    let directory = TempDir::new().unwrap();
    let root = directory.path().canonicalize().unwrap();
    for (name, contents) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    let path = root.join(files[0].0);
    let target = Target { name: "made_up".into(), is_library: true, path };
    imports::arrows(&Tree::load(&[target]).unwrap(), &root)
}

/// Graph as text, one line for each edge.
fn lines(files: &[(&str, &str)]) -> Vec<String> {
    arrows(files).lines()
}

#[test]
fn two_files_that_import_each_other_are_found_with_the_names() {
    let arrows = arrows(&[
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::{Two, Three}; pub struct One(Two, Three);"),
        ("b.rs", "pub struct Two; pub struct Three; fn f(_: &super::a::One) {}"),
    ]);
    let text = cycles("made_up", &arrows).join("\n");
    assert!(text.starts_with("made_up: 2 files import in a cycle"), "{text}");
    assert!(text.ends_with(":\n  a.rs -> b.rs: Three, Two\n  b.rs -> a.rs: One"), "{text}");
}

#[test]
fn a_declaration_is_no_import_and_a_re_export_is() {
    let lib = "mod a; mod b; pub use b::B; pub(crate) mod c; pub(in crate::a) fn f() {}";
    let found = lines(&[
        ("lib.rs", lib),
        ("a.rs", "pub struct A;"),
        ("b.rs", "pub struct B;"),
        ("c/mod.rs", "pub mod d;"),
        ("c/d.rs", ""),
    ]);
    assert_eq!(found, ["lib.rs -> b.rs: B"]);
}

#[test]
fn a_re_export_is_resolved_to_the_defining_file() {
    let found = lines(&[
        ("lib.rs", "mod a; mod facade;"),
        ("a.rs", "use crate::facade::Renamed; fn f() { crate::facade::deep::g(Renamed::NEW) }"),
        (
            "facade/mod.rs",
            "pub use self::inner::Real as Renamed; pub use inner as deep; mod inner;",
        ),
        ("facade/inner.rs", "pub struct Real; pub fn g(_: Real) {}"),
    ]);
    assert_eq!(
        found,
        ["a.rs -> facade/inner.rs: Real, g", "facade/mod.rs -> facade/inner.rs: Real, inner"]
    );
}

#[test]
fn importing_a_sibling_through_the_parent_is_no_cycle() {
    let found = arrows(&[
        ("lib.rs", "mod a; mod b; pub use a::A; use b::B; pub fn f() -> (A, B) { todo!() }"),
        ("a.rs", "pub struct A;"),
        ("b.rs", "use super::A; pub struct B(A);"),
    ]);
    assert_eq!(found.lines(), ["b.rs -> a.rs: A", "lib.rs -> a.rs: A", "lib.rs -> b.rs: B"]);
    assert!(cycles("made_up", &found).is_empty());
}

#[test]
fn items_of_the_parent_are_imported_from_the_parent() {
    let found = arrows(&[
        ("lib.rs", "mod a; pub use a::A; pub struct Own;"),
        ("a.rs", "pub struct A(super::Own);"),
    ]);
    assert_eq!(found.lines(), ["a.rs -> lib.rs: Own", "lib.rs -> a.rs: A"]);
    assert_eq!(cycles("made_up", &found).len(), 1);
}

#[test]
fn test_and_model_code_is_excluded() {
    let files = |attribute: &str| {
        let a = "pub struct A; ATTRIBUTE use crate::b::B; ATTRIBUTE mod tests; \
            impl A { ATTRIBUTE fn f() { super::b::g() } } \
            ATTRIBUTE mod inline { use crate::b::B; }"
            .replace("ATTRIBUTE", attribute);
        arrows(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", &a),
            ("a/tests.rs", "use crate::b::B;"),
            ("b.rs", "pub struct B(crate::a::A); pub fn g() {}"),
        ])
    };
    for left_out in ["#[cfg(test)]", "#[cfg(all(test, not(loom)))]", "#[cfg(loom)]"] {
        assert_eq!(files(left_out).lines(), ["b.rs -> a.rs: A"], "{left_out}");
    }
    assert_eq!(
        files("#[cfg(any(test, unix))]").lines(),
        ["a.rs -> b.rs: B, g", "a/tests.rs -> b.rs: B", "b.rs -> a.rs: A"]
    );
}

#[test]
fn paths_in_macros_are_imports() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; fn f() { println!(\"{}\", b::VALUE); }"),
        ("a.rs", "fn f() { assert_eq!(1, (crate::b::VALUE), \"\"); vec![super::b::g(); 2]; }"),
        ("b.rs", "pub const VALUE: u8 = 1; pub fn g() {}"),
    ]);
    assert_eq!(found, ["a.rs -> b.rs: VALUE, g", "lib.rs -> b.rs: VALUE"]);
}

#[test]
fn a_macro_belongs_to_its_defining_file() {
    let found = lines(&[
        ("lib.rs", "#[macro_use] mod a; mod b; mod c; mod d;"),
        ("a.rs", "macro_rules! lent { () => {} } lent!();"),
        ("b.rs", "lent!(); crate::c::passed!(); crate::exported!();"),
        ("c.rs", "macro_rules! passed { () => {} } pub(crate) use passed;"),
        ("d.rs", "#[macro_export] macro_rules! exported { () => {} }"),
    ]);
    assert_eq!(found, ["b.rs -> a.rs: lent", "b.rs -> c.rs: passed", "b.rs -> d.rs: exported"]);
}

#[test]
fn items_of_a_macro_call_belong_to_the_calling_file() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; mod c; pub use b::*;"),
        ("a.rs", "fn f(_: crate::c::Hidden, _: crate::Whole) {}"),
        ("b.rs", "bits! { pub struct Whole(u8); }"),
        ("c.rs", "names! { hidden }"),
    ]);
    assert_eq!(found, ["a.rs -> b.rs: Whole", "a.rs -> c.rs: Hidden", "lib.rs -> b.rs: *"]);
}

#[test]
fn names_are_resolved_through_globs() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use super::b::*; fn f(_: Two) { three() }"),
        ("b.rs", "pub use super::c::*; pub struct Two;"),
        ("c.rs", "pub fn three() {}"),
    ]);
    assert_eq!(found, ["a.rs -> b.rs: *, Two", "a.rs -> c.rs: three", "b.rs -> c.rs: *"]);
}

#[test]
fn an_imported_module_counts_where_its_names_are_used() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use crate::{b, c}; fn f() { use crate::c as d; b::g(); d::h(); }"),
        ("b.rs", "pub fn g() {}"),
        ("c.rs", "pub fn h() {} use std::fmt::{self, Debug}; fn f(_: &dyn fmt::Debug) {}"),
    ]);
    assert_eq!(found, ["a.rs -> b.rs: g", "a.rs -> c.rs: h"]);
}

#[test]
fn a_path_prefers_a_module_to_a_function_of_the_same_name() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; fn b() {}"),
        ("a.rs", "use super::b::B;"),
        ("b.rs", "pub struct B;"),
    ]);
    assert_eq!(found, ["a.rs -> b.rs: B"]);
}

#[test]
fn external_paths_are_no_imports() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b; pub use std::fmt; extern crate serde as other;"),
        ("a.rs", "use b::B; use super::fmt::Debug; fn f(_: ::b::C, _: crate::other::D) {}"),
        ("b.rs", ""),
    ]);
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn an_impl_imports_its_type_from_the_defining_file() {
    let found = lines(&[
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub struct A;"),
        ("b.rs", "use super::a; impl a::A { fn f(&self) {} }"),
    ]);
    assert_eq!(found, ["b.rs -> a.rs: A"]);
}

#[test]
fn module_files_are_found_as_by_the_compiler() {
    let found = lines(&[
        (
            "src/lib.rs",
            "#[path = \"other/x.rs\"] mod a; mod b; mod i { pub mod j; } fn f(_: a::y::Y) {}",
        ),
        ("src/other/x.rs", "pub mod y;"),
        ("src/other/y.rs", "pub struct Y(crate::b::c::C);"),
        ("src/b.rs", "pub mod c;"),
        ("src/b/c.rs", "pub struct C(crate::i::j::J);"),
        ("src/i/j.rs", "pub struct J;"),
    ]);
    assert_eq!(
        found,
        [
            "src/b/c.rs -> src/i/j.rs: J",
            "src/lib.rs -> src/other/y.rs: Y",
            "src/other/y.rs -> src/b/c.rs: C"
        ]
    );
}

#[test]
fn a_program_imports_the_library_by_its_name() {
    let directory = TempDir::new().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let target = |file: &str, contents: &str, library| {
        let path = root.join(file);
        fs::write(&path, contents).unwrap();
        Target { name: "made_up".into(), is_library: library, path }
    };
    let targets = [
        target("lib.rs", "pub fn work() {}", true),
        target("main.rs", "fn main() { made_up::work() }", false),
    ];
    let arrows = imports::arrows(&Tree::load(&targets).unwrap(), &root);
    assert_eq!(arrows.lines(), ["main.rs -> lib.rs: work"]);
}

#[test]
fn a_module_without_a_file_is_an_error() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("lib.rs");
    fs::write(&path, "mod lost;").unwrap();
    let target = Target { name: "made_up".into(), is_library: true, path };
    let Err(error) = Tree::load(&[target]) else { panic!("nothing was missed") };
    assert!(error.to_string().contains("says `mod lost;`"), "{error}");
}

#[test]
fn a_dependency_on_a_higher_layer_is_found() {
    let directory = TempDir::new().unwrap();
    let root = directory.path();
    fs::write(root.join("Cargo.toml"), "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n")
        .unwrap();
    for (name, rest) in [
        ("spec", "[dependencies]\nmemory = { path = \"../memory\" }\n"),
        ("memory", "[dev-dependencies]\ndriver = { path = \"../driver\" }\n"),
        ("driver", "[dependencies]\nspec = { path = \"../spec\" }\n"),
        ("odd", ""),
    ] {
        let package = root.join("crates").join(name);
        fs::create_dir_all(package.join("src")).unwrap();
        fs::create_dir_all(package.join("tests")).unwrap();
        fs::write(package.join("src/lib.rs"), "").unwrap();
        fs::write(package.join("tests/t.rs"), "").unwrap();
        let manifest = format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n{rest}");
        fs::write(package.join("Cargo.toml"), manifest).unwrap();
    }
    let metadata = shadowbell_bench::workspace::cargo()
        .current_dir(root)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .output()
        .unwrap();
    let packages = packages(&metadata.stdout).unwrap();
    assert_eq!(packages.len(), 4);
    assert!(packages.iter().all(|package| package.targets.len() == 1), "{packages:?}");
    let mut wrong: Vec<String> = packages.iter().flat_map(misplaced).collect();
    wrong.sort();
    assert_eq!(wrong.len(), 2, "{wrong:?}");
    assert!(wrong[0].starts_with("crates/odd is in no layer"), "{wrong:?}");
    assert!(wrong[1].starts_with("crates/spec builds on crates/memory"), "{wrong:?}");
}
