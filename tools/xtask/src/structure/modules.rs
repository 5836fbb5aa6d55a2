//! Modules of a package, parsed from its files, and the names in each module.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::ext::IdentExt;
use syn::visit::Visit;
use syn::{ForeignItem, Ident, Item, ItemMacro, ItemMod, ItemUse};

use super::syntax::{Leaf, OUTSIDE, excluded, items_in, leaves, text};

/// Library or program of a package.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// Name by which code imports the target.
    pub(super) name: String,
    pub(super) is_library: bool,
    /// Root file.
    pub(super) path: PathBuf,
}

/// Modules of a package.
pub(super) struct Tree {
    pub(super) files: Vec<PathBuf>,
    pub(super) modules: Vec<Module>,
    /// Name under which the package's own programs import its library, and index of the library's
    /// root module.
    pub(super) lib_root: Option<(String, usize)>,
}

/// Module, in its own file or inline.
pub(super) struct Module {
    pub(super) file: usize,
    pub(super) root: usize,
    pub(super) parent: Option<usize>,
    /// Items of the module, without its submodules.
    pub(super) items: Vec<Item>,
    /// Bindings by name. One name can be a type, a function and a macro at once.
    pub(super) names: HashMap<String, Vec<Binding>>,
    /// Paths of glob imports.
    pub(super) globs: Vec<Vec<String>>,
    /// Macros that the module defines by `macro_rules!`. Submodules that follow them can use them
    /// without an import.
    pub(super) macros: Vec<String>,
    /// Submodules with `#[macro_use]`, whose macros are visible in this module.
    pub(super) macro_modules: Vec<usize>,
}

/// Meaning of a name.
pub(super) enum Binding {
    /// An item defined in this file.
    Item(usize),
    Module(usize),
    Import(Vec<String>),
    /// An import in a function's body, which other modules cannot use.
    Local(Vec<String>),
}

/// Directories in which the files of a module's submodules are searched.
struct ModuleDirectory {
    /// Directory for `mod x;`.
    plain: PathBuf,
    /// Directory for `#[path = "..."] mod x;`.
    by_path: PathBuf,
}

impl Tree {
    /// Parses all files that the targets of a package reach.
    pub(super) fn load(targets: &[Target]) -> Result<Self> {
        let mut tree = Self { files: Vec::new(), modules: Vec::new(), lib_root: None };
        for target in targets {
            let root = tree.modules.len();
            tree.file(&target.path, root, None, true)?;
            if target.is_library {
                tree.lib_root = Some((target.name.clone(), root));
            }
        }
        Ok(tree)
    }

    fn file(
        &mut self,
        path: &Path,
        root: usize,
        parent: Option<usize>,
        owns_directory: bool,
    ) -> Result<usize> {
        let path = fs::canonicalize(path).with_context(|| path.display().to_string())?;
        let source = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let parsed = syn::parse_file(&source)
            .with_context(|| format!("{} is not Rust that parses; fix it first", path.display()))?;
        let file = self.files.iter().position(|known| *known == path).unwrap_or_else(|| {
            self.files.push(path.clone());
            self.files.len() - 1
        });
        let items = if excluded(&parsed.attrs) { Vec::new() } else { parsed.items };
        let by_path = path.parent().unwrap_or(&path).to_path_buf();
        let plain = if owns_directory { by_path.clone() } else { path.with_extension("") };
        self.module(file, root, parent, items, &ModuleDirectory { plain, by_path })
    }

    fn module(
        &mut self,
        file: usize,
        root: usize,
        parent: Option<usize>,
        items: Vec<Item>,
        place: &ModuleDirectory,
    ) -> Result<usize> {
        let at = self.modules.len();
        self.modules.push(Module {
            file,
            root,
            parent,
            items: Vec::new(),
            names: HashMap::new(),
            globs: Vec::new(),
            macros: Vec::new(),
            macro_modules: Vec::new(),
        });
        for item in items {
            if excluded(attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(child) => self.child(at, child, place)?,
                item => {
                    self.name(at, &item);
                    self.modules[at].items.push(item);
                }
            }
        }
        Ok(at)
    }

    fn child(&mut self, at: usize, child: ItemMod, place: &ModuleDirectory) -> Result<()> {
        let Module { file, root, .. } = self.modules[at];
        let name = child.ident.unraw().to_string();
        let module = match child.content {
            Some((_, items)) => {
                let inside = place.plain.join(&name);
                let place = ModuleDirectory { plain: inside.clone(), by_path: inside };
                self.module(file, root, Some(at), items, &place)?
            }
            None => {
                if let Some(path) = text(&child.attrs, "path") {
                    self.file(&place.by_path.join(path), root, Some(at), true)?
                } else {
                    let plain = place.plain.join(format!("{name}.rs"));
                    let nested = place.plain.join(&name).join("mod.rs");
                    match (plain.is_file(), nested.is_file()) {
                        (true, _) => self.file(&plain, root, Some(at), false)?,
                        (false, true) => self.file(&nested, root, Some(at), true)?,
                        (false, false) => {
                            let from = self.files[file].display();
                            bail!(
                                "{from} says `mod {name};`, and neither {} nor {} is there; \
                                add the file or remove the line",
                                plain.display(),
                                nested.display()
                            )
                        }
                    }
                }
            }
        };
        self.bind(at, name, Binding::Module(module));
        if child.attrs.iter().any(|attribute| attribute.path().is_ident("macro_use")) {
            self.modules[at].macro_modules.push(module);
        }
        Ok(())
    }

    fn bind(&mut self, at: usize, name: String, binding: Binding) {
        self.modules[at].names.entry(name).or_default().push(binding);
    }

    /// Records the names that an item defines in its module.
    fn name(&mut self, at: usize, item: &Item) {
        let here = self.modules[at].file;
        let mut define = |name: &Ident| {
            self.bind(at, name.unraw().to_string(), Binding::Item(here));
        };
        match item {
            Item::Const(item) => define(&item.ident),
            Item::Enum(item) => define(&item.ident),
            Item::Fn(item) => define(&item.sig.ident),
            Item::Static(item) => define(&item.ident),
            Item::Struct(item) => define(&item.ident),
            Item::Trait(item) => define(&item.ident),
            Item::TraitAlias(item) => define(&item.ident),
            Item::Type(item) => define(&item.ident),
            Item::Union(item) => define(&item.ident),
            Item::ForeignMod(block) => {
                for item in &block.items {
                    match item {
                        ForeignItem::Fn(item) => define(&item.sig.ident),
                        ForeignItem::Static(item) => define(&item.ident),
                        ForeignItem::Type(item) => define(&item.ident),
                        _ => {}
                    }
                }
            }
            Item::ExternCrate(item) => {
                let name = item.rename.as_ref().map_or(&item.ident, |(_, name)| name);
                let path = vec![OUTSIDE.to_owned(), item.ident.unraw().to_string()];
                self.bind(at, name.unraw().to_string(), Binding::Import(path));
            }
            Item::Macro(item) => self.name_macro(at, item),
            Item::Use(item) => leaves(item).into_iter().for_each(|leaf| self.import(at, leaf)),
            _ => {}
        }
        let mut bodies = Bodies::default();
        bodies.visit_item(item);
        for leaf in bodies.leaves {
            if leaf.glob {
                self.import(at, leaf);
            } else if let Some(name) = leaf.name {
                self.bind(at, name, Binding::Local(leaf.path));
            }
        }
    }

    fn import(&mut self, at: usize, leaf: Leaf) {
        if leaf.glob {
            self.modules[at].globs.push(leaf.path);
        } else if let Some(name) = leaf.name {
            self.bind(at, name, Binding::Import(leaf.path));
        }
    }

    fn name_macro(&mut self, at: usize, item: &ItemMacro) {
        let Module { file, root, .. } = self.modules[at];
        if let Some(name) = &item.ident {
            let name = name.unraw().to_string();
            if item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
                self.bind(root, name.clone(), Binding::Item(file));
            }
            self.modules[at].macros.push(name.clone());
            self.bind(at, name, Binding::Item(file));
        } else {
            for name in items_in(item.mac.tokens.clone()) {
                self.bind(at, name, Binding::Item(file));
            }
        }
    }
}

/// Collects the imports within function bodies.
#[derive(Default)]
struct Bodies {
    leaves: Vec<Leaf>,
}

impl<'ast> Visit<'ast> for Bodies {
    fn visit_block(&mut self, block: &'ast syn::Block) {
        for statement in &block.stmts {
            if let syn::Stmt::Item(Item::Use(item)) = statement {
                self.take(item);
            }
        }
        syn::visit::visit_block(self, block);
    }
}

impl Bodies {
    fn take(&mut self, item: &ItemUse) {
        if !excluded(&item.attrs) {
            self.leaves.extend(leaves(item));
        }
    }
}

/// Attributes of an item.
pub(super) fn attributes(item: &Item) -> &[syn::Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
