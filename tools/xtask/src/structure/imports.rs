//! Imports of files: every path in the code, including macros.

use std::path::Path;

use syn::ext::IdentExt;
use syn::visit::{self, Visit};

use super::cycles::Arrows;
use super::modules::{Tree, attributes};
use super::names::Meaning;
use super::syntax::{Leaf, OUTSIDE, Scan, excluded, leaves};

/// Graph of the imports between the files of a package. File names are relative to `root`.
pub(super) fn arrows(tree: &Tree, root: &Path) -> Arrows {
    let names: Vec<String> = tree
        .files
        .iter()
        .map(|file| file.strip_prefix(root).unwrap_or(file).display().to_string())
        .collect();
    let mut arrows = Arrows::new(&names);
    for (module, contents) in tree.modules.iter().enumerate() {
        let mut paths = Paths { tree, module, found: Vec::new() };
        contents.items.iter().for_each(|item| paths.visit_item(item));
        for (file, name) in paths.found {
            arrows.add(&names[contents.file], &names[file], name);
        }
    }
    arrows
}

struct Paths<'a> {
    tree: &'a Tree,
    module: usize,
    /// Imports found so far: index of the file that defines the name, and the name.
    found: Vec<(usize, String)>,
}

impl Paths<'_> {
    /// Records an import for a path in the code. A path to a module itself is not an import. A path
    /// through a module to one of its names is an import.
    fn path(&mut self, path: &[String]) {
        for meaning in self.tree.resolve(self.module, path) {
            if let Meaning::Item { file, name } = meaning {
                self.found.push((file, name));
            }
        }
    }

    fn leaf(&mut self, leaf: &Leaf) {
        for meaning in self.tree.resolve(self.module, &leaf.path) {
            match meaning {
                Meaning::Item { file, name } => self.found.push((file, name)),
                Meaning::Module(module) if leaf.glob => {
                    self.found.push((self.tree.modules[module].file, "*".to_owned()));
                }
                Meaning::Module(module) if leaf.is_re_exported => {
                    let name = leaf.path.last().cloned().unwrap_or_default();
                    self.found.push((self.tree.modules[module].file, name));
                }
                Meaning::Module(_) => {}
            }
        }
    }
}

fn segments(path: &syn::Path) -> Vec<String> {
    let start = path.leading_colon.map(|_| OUTSIDE.to_owned());
    start.into_iter().chain(path.segments.iter().map(|s| s.ident.unraw().to_string())).collect()
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.path(&segments(path));
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        leaves(item).iter().for_each(|leaf| self.leaf(leaf));
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let path = segments(&call.path);
        let before = self.found.len();
        self.path(&path);
        if let ([name], true) = (path.as_slice(), before == self.found.len())
            && let Some(Meaning::Item { file, name }) = self.tree.resolve_macro(self.module, name)
        {
            self.found.push((file, name));
        }
        let scan = Scan::new(call.tokens.clone());
        scan.paths.iter().for_each(|path| self.path(path));
        scan.uses.iter().flat_map(leaves).for_each(|leaf| self.leaf(&leaf));
    }

    // Paths in attributes do not count.
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !excluded(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            _ => return,
        };
        if !excluded(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        let attributes = match item {
            syn::TraitItem::Const(item) => &item.attrs,
            syn::TraitItem::Fn(item) => &item.attrs,
            syn::TraitItem::Macro(item) => &item.attrs,
            syn::TraitItem::Type(item) => &item.attrs,
            _ => return,
        };
        if !excluded(attributes) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !excluded(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !excluded(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !excluded(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !excluded(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_local(&mut self, statement: &'ast syn::Local) {
        if !excluded(&statement.attrs) {
            visit::visit_local(self, statement);
        }
    }

    fn visit_stmt_macro(&mut self, statement: &'ast syn::StmtMacro) {
        if !excluded(&statement.attrs) {
            visit::visit_stmt_macro(self, statement);
        }
    }

    fn visit_expr(&mut self, expression: &'ast syn::Expr) {
        let attributes = match expression {
            syn::Expr::Block(block) => &block.attrs,
            syn::Expr::Call(call) => &call.attrs,
            syn::Expr::MethodCall(call) => &call.attrs,
            syn::Expr::If(branch) => &branch.attrs,
            _ => return visit::visit_expr(self, expression),
        };
        if !excluded(attributes) {
            visit::visit_expr(self, expression);
        }
    }
}
