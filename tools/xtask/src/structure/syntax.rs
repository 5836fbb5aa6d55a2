//! Syntactic information: `cfg` conditions, `use` trees, and paths among a macro's tokens.

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::{Attribute, Expr, ItemUse, Lit, Meta, UseTree};

/// First segment of a path that starts with `::`.
pub(super) const OUTSIDE: &str = "::";

/// True if the item is compiled only for tests or models.
pub(super) fn excluded(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|condition| needs_tests(&condition))
        }
        _ => false,
    })
}

fn needs_tests(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test") || path.is_ident("loom"),
        Meta::List(list) if list.path.is_ident("all") => {
            let parts = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
            list.parse_args_with(parts).is_ok_and(|parts| parts.iter().any(needs_tests))
        }
        _ => false,
    }
}

/// Text of the attribute `#[NAME = "text"]`.
pub(super) fn text(attributes: &[Attribute], name: &str) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident(name) => match &pair.value {
            Expr::Lit(value) => match &value.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    })
}

/// One name of a `use` tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Path that is imported. For a glob import, the path of the module.
    pub(super) path: Vec<String>,
    /// Name that the import has in this module. `None` for `_` and for globs.
    pub(super) name: Option<String>,
    pub(super) glob: bool,
    /// True if other modules can import the name from this module.
    pub(super) is_re_exported: bool,
}

/// Names of a `use` tree.
pub(super) fn leaves(item: &ItemUse) -> Vec<Leaf> {
    let mut found = Vec::new();
    let prefix = item.leading_colon.map(|_| OUTSIDE.to_owned()).into_iter().collect();
    flatten(&item.tree, prefix, &mut found);
    let is_re_exported = !matches!(item.vis, syn::Visibility::Inherited);
    found.iter_mut().for_each(|leaf| leaf.is_re_exported = is_re_exported);
    found
}

fn flatten(tree: &UseTree, mut path: Vec<String>, found: &mut Vec<Leaf>) {
    let mut leaf = |mut path: Vec<String>, name: Option<String>, glob| {
        // `x::{self}` is x.
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        found.push(Leaf { path, name, glob, is_re_exported: false });
    };
    match tree {
        UseTree::Path(step) => {
            path.push(step.ident.unraw().to_string());
            flatten(&step.tree, path, found);
        }
        UseTree::Name(last) => {
            let mut name = last.ident.unraw().to_string();
            path.push(name.clone());
            if name == "self" {
                name = path.iter().nth_back(1).cloned().unwrap_or(name);
            }
            leaf(path, Some(name), false);
        }
        UseTree::Rename(last) => {
            path.push(last.ident.unraw().to_string());
            let name = last.rename.unraw().to_string();
            leaf(path, Some(name).filter(|name| name != "_"), false);
        }
        UseTree::Glob(_) => leaf(path, None, true),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, path.clone(), found);
            }
        }
    }
}

/// Paths and `use` items among the tokens of a macro call.
#[derive(Default)]
pub(super) struct Scan {
    pub(super) paths: Vec<Vec<String>>,
    pub(super) uses: Vec<ItemUse>,
}

impl Scan {
    pub(super) fn new(tokens: TokenStream) -> Self {
        let mut scan = Self::default();
        scan.read(tokens);
        scan
    }

    fn read(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                TokenTree::Group(group) => {
                    self.read(group.stream());
                    at += 1;
                }
                TokenTree::Ident(word) if word == "use" => {
                    let length = tokens[at..].iter().take_while(|t| !is(t, ';')).count() + 1;
                    let end = tokens.len().min(at + length);
                    match syn::parse2(tokens[at..end].iter().cloned().collect()) {
                        Ok(item) => {
                            self.uses.push(item);
                            at = end;
                        }
                        // Either these tokens are no `use` item, or they contain variables of the
                        // macro.
                        Err(_) => at += 1,
                    }
                }
                TokenTree::Ident(word) => {
                    let mut path = vec![word.unraw().to_string()];
                    let start = at;
                    at += 1;
                    while let [a, b, TokenTree::Ident(next), ..] = &tokens[at..]
                        && is(a, ':')
                        && is(b, ':')
                    {
                        path.push(next.unraw().to_string());
                        at += 3;
                    }
                    if leads(&tokens[..start], &path[0]) {
                        self.paths.push(path);
                    }
                }
                _ => at += 1,
            }
        }
    }
}

/// True if a path can begin behind the tokens `before`. A path cannot begin inside another path, at
/// the name of a field or method, or at a variable of the macro (except `$crate`).
fn leads(before: &[TokenTree], first: &str) -> bool {
    match before {
        // `0..LIMIT` is a range, not a field.
        [.., a, b] if is(a, '.') && is(b, '.') => true,
        // `::x` is an external path, and the rest of `<T as X>::` is not a path of its own.
        [.., a, b] if is(a, ':') && is(b, ':') => false,
        [.., last] if is(last, '$') => first == "crate",
        [.., last] if is(last, '.') => false,
        _ => true,
    }
}

fn is(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

/// Names of items in the tokens of a macro call: those after `struct`, `fn` and other keywords.
pub(super) fn items_in(tokens: TokenStream) -> Vec<String> {
    const KINDS: [&str; 9] =
        ["struct", "enum", "union", "trait", "type", "fn", "const", "static", "mod"];
    let mut names = Vec::new();
    let mut kind = false;
    for token in tokens {
        match token {
            TokenTree::Ident(word) if kind => {
                names.push(word.unraw().to_string());
                kind = false;
            }
            TokenTree::Ident(word) => kind = KINDS.iter().any(|known| word == known),
            _ => kind = false,
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(text: &str) -> bool {
        let item: syn::ItemMod = syn::parse_str(&format!("#[cfg({text})] mod x {{}}")).unwrap();
        excluded(&item.attrs)
    }

    #[test]
    fn only_test_and_model_code_is_excluded() {
        assert!(condition("test"));
        assert!(condition("loom"));
        assert!(condition("all(test, not(loom))"));
        assert!(!condition("any(test, unix)"));
        assert!(!condition("not(test)"));
        assert!(!condition("feature = \"test\""));
    }

    #[test]
    fn a_use_tree_is_split_into_names() {
        let item = syn::parse_str("pub use a::{self, b::{C as D, T as _}, e::*};").unwrap();
        let short = |leaf: &Leaf| (leaf.path.join("::"), leaf.name.clone(), leaf.glob);
        let found: Vec<_> = leaves(&item).iter().map(short).collect();
        let want = [
            ("a", Some("a"), false),
            ("a::b::C", Some("D"), false),
            ("a::b::T", None, false),
            ("a::e", None, true),
        ];
        let want = want.map(|(path, name, glob)| (path.into(), name.map(str::to_owned), glob));
        assert_eq!(found, want);
        assert!(leaves(&item).iter().all(|leaf| leaf.is_re_exported));
    }

    #[test]
    fn paths_are_found_among_tokens() {
        let tokens = "fn f() { $crate::a::B; x.y; $z; (super::C, 0..LIMIT) } \
            use super::{D, e::F};";
        let scan = Scan::new(tokens.parse().unwrap());
        let paths: Vec<_> = scan.paths.iter().map(|path| path.join("::")).collect();
        assert_eq!(paths, ["fn", "f", "crate::a::B", "x", "super::C", "LIMIT"]);
        assert_eq!(leaves(&scan.uses[0]).len(), 2);
    }
}
