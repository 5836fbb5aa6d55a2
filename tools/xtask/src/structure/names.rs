//! Name resolution: from a path, through modules and re-exports, to the file with the definition.

use super::modules::{Binding, Tree};
use super::syntax::OUTSIDE;

/// Meaning of a path or of its prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    Module(usize),
    /// Item that a file defines. If the path continues after the item, to a variant or an
    /// associated function, it still means this item.
    Item {
        file: usize,
        name: String,
    },
}

/// Names that are being resolved. A name that occurs a second time is not followed, so cyclic
/// definitions do not cause an endless recursion.
type Trail<'a> = Vec<(usize, &'a str)>;

impl Tree {
    /// Resolves a path as seen in a module. Returns no meaning if the path leads out of the
    /// package.
    pub(super) fn resolve(&self, module: usize, path: &[String]) -> Vec<Meaning> {
        self.follow(module, path, &mut Vec::new())
    }

    /// Resolves a macro that the module sees without an import.
    pub(super) fn resolve_macro(&self, module: usize, name: &str) -> Option<Meaning> {
        let mut at = Some(module);
        while let Some(module) = at {
            let seen =
                std::iter::once(module).chain(self.modules[module].macro_modules.iter().copied());
            for candidate in seen {
                let candidate = &self.modules[candidate];
                if candidate.macros.iter().any(|known| known == name) {
                    return Some(Meaning::Item { file: candidate.file, name: name.to_owned() });
                }
            }
            at = self.modules[module].parent;
        }
        None
    }

    fn follow<'a>(
        &'a self,
        module: usize,
        path: &'a [String],
        trail: &mut Trail<'a>,
    ) -> Vec<Meaning> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        let reached = match first.as_str() {
            "crate" => vec![Meaning::Module(self.modules[module].root)],
            "self" => vec![Meaning::Module(module)],
            "super" => self.modules[module].parent.map(Meaning::Module).into_iter().collect(),
            OUTSIDE => {
                let Some((first, rest)) = rest.split_first() else { return Vec::new() };
                return self.steps(self.package(first), rest, trail);
            }
            name => {
                let found = self.look_up(module, name, true, trail);
                if found.is_empty() { self.package(name) } else { found }
            }
        };
        self.steps(reached, rest, trail)
    }

    fn steps<'a>(
        &'a self,
        mut reached: Vec<Meaning>,
        rest: &'a [String],
        trail: &mut Trail<'a>,
    ) -> Vec<Meaning> {
        for segment in rest {
            // A module and a function or macro can have the same name. If the path continues, the
            // module is meant.
            if reached.iter().any(|meaning| matches!(meaning, Meaning::Module(_))) {
                reached.retain(|meaning| matches!(meaning, Meaning::Module(_)));
            }
            let mut next = Vec::new();
            for meaning in reached {
                match meaning {
                    Meaning::Module(module) if segment == "super" => {
                        next.extend(self.modules[module].parent.map(Meaning::Module));
                    }
                    Meaning::Module(module) => next.extend(self.member(module, segment, trail)),
                    item @ Meaning::Item { .. } => next.push(item),
                }
            }
            reached = next;
        }
        let mut once = Vec::new();
        for meaning in reached {
            if !once.contains(&meaning) {
                once.push(meaning);
            }
        }
        once
    }

    /// Resolves a name in a module, as seen from another module.
    fn member<'a>(&'a self, module: usize, name: &'a str, trail: &mut Trail<'a>) -> Vec<Meaning> {
        let found = self.look_up(module, name, false, trail);
        if found.is_empty() && !self.binds(module, name) {
            // A macro has defined the name in that module.
            let file = self.modules[module].file;
            return vec![Meaning::Item { file, name: name.to_owned() }];
        }
        found
    }

    /// True if the module binds the name. If the binding cannot be resolved, it leaves the
    /// package.
    fn binds(&self, module: usize, name: &str) -> bool {
        self.modules[module].names.contains_key(name)
    }

    fn look_up<'a>(
        &'a self,
        module: usize,
        name: &'a str,
        within: bool,
        trail: &mut Trail<'a>,
    ) -> Vec<Meaning> {
        if trail.contains(&(module, name)) {
            return Vec::new();
        }
        trail.push((module, name));
        let mut found = Vec::new();
        for binding in self.modules[module].names.get(name).into_iter().flatten() {
            match binding {
                Binding::Item(file) => {
                    found.push(Meaning::Item { file: *file, name: name.to_owned() });
                }
                Binding::Module(child) => found.push(Meaning::Module(*child)),
                Binding::Import(path) => found.extend(self.follow(module, path, trail)),
                Binding::Local(path) if within => found.extend(self.follow(module, path, trail)),
                Binding::Local(_) => {}
            }
        }
        if found.is_empty() && !self.binds(module, name) {
            for glob in &self.modules[module].globs {
                for opened in self.follow(module, glob, trail) {
                    if let Meaning::Module(opened) = opened {
                        found.extend(self.look_up(opened, name, false, trail));
                    }
                }
            }
        }
        trail.pop();
        found
    }

    /// Resolves the name of the package's library.
    fn package(&self, name: &str) -> Vec<Meaning> {
        match &self.lib_root {
            Some((library, root)) if library == name => vec![Meaning::Module(*root)],
            _ => Vec::new(),
        }
    }
}
