//! Graph of imports between files: cycles and topological order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Graph of imports: for each importing file and each file that it imports from, the imported
/// names.
#[derive(Debug, Default)]
pub(super) struct Arrows(BTreeMap<String, BTreeMap<String, BTreeSet<String>>>);

impl Arrows {
    /// Graph without edges.
    pub(super) fn new(files: &[String]) -> Self {
        Self(files.iter().map(|file| (file.clone(), BTreeMap::new())).collect())
    }

    /// Adds an edge: `from` imports `name` from `to`. Imports of a file from itself are ignored.
    pub(super) fn add(&mut self, from: &str, to: &str, name: String) {
        if from != to {
            let arrows = self.0.entry(from.to_owned()).or_default();
            arrows.entry(to.to_owned()).or_default().insert(name);
        }
    }

    pub(super) fn files(&self) -> usize {
        self.0.len()
    }

    pub(super) fn count(&self) -> usize {
        self.0.values().map(BTreeMap::len).sum()
    }

    fn imports(&self, file: &str) -> impl Iterator<Item = &str> {
        self.0.get(file).into_iter().flat_map(|to| to.keys().map(String::as_str))
    }

    /// Shortest path from one file to another; it includes both files. If both are the same file,
    /// the path is a cycle.
    fn shortest_path<'a>(&'a self, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
        let mut ways = VecDeque::from([vec![from]]);
        let mut seen = BTreeSet::new();
        while let Some(shortest_path) = ways.pop_front() {
            for next in self.imports(shortest_path[shortest_path.len() - 1]) {
                let longer = || shortest_path.iter().copied().chain([next]).collect();
                if next == to {
                    return Some(longer());
                }
                if seen.insert(next) {
                    ways.push_back(longer());
                }
            }
        }
        None
    }

    /// Strongly connected components with more than one file.
    pub(super) fn cycles(&self) -> Vec<BTreeSet<&str>> {
        let mut cycles: Vec<BTreeSet<&str>> = Vec::new();
        for file in self.0.keys() {
            if cycles.iter().any(|cycle| cycle.contains(file.as_str())) {
                continue;
            }
            let both_ways = |other: &&String| {
                self.shortest_path(file, other).is_some()
                    && self.shortest_path(other, file).is_some()
            };
            let cycle: BTreeSet<&str> =
                self.0.keys().filter(both_ways).map(String::as_str).collect();
            if cycle.len() > 1 {
                cycles.push(cycle);
            }
        }
        cycles
    }

    /// Text of a cycle: the shortest path around it, then all other edges within it.
    pub(super) fn describe(&self, cycle: &BTreeSet<&str>) -> String {
        let shortest = cycle
            .iter()
            .filter_map(|file| self.shortest_path(file, file))
            .min_by_key(Vec::len)
            .unwrap_or_default();
        let mut text = String::new();
        for pair in shortest.windows(2) {
            text += &self.arrow(pair[0], pair[1]);
        }
        let mut rest = String::new();
        for from in cycle {
            for to in self.imports(from).filter(|to| cycle.contains(to)) {
                if !shortest.windows(2).any(|pair| pair == [*from, to]) {
                    rest += &self.arrow(from, to);
                }
            }
        }
        if !rest.is_empty() {
            text += "  and among the same files:\n";
            text += &rest;
        }
        text
    }

    fn arrow(&self, from: &str, to: &str) -> String {
        let names = self.0.get(from).and_then(|arrows| arrows.get(to)).into_iter().flatten();
        let names: Vec<&str> = names.map(String::as_str).collect();
        format!("  {from} -> {to}: {}\n", names.join(", "))
    }

    /// All edges as text, for tests.
    #[cfg(test)]
    pub(super) fn lines(&self) -> Vec<String> {
        let pairs = self.0.iter().flat_map(|(from, to)| to.keys().map(move |to| (from, to)));
        pairs.map(|(from, to)| self.arrow(from, to).trim().to_owned()).collect()
    }

    /// Files from bottom to top, each with its height. The height of a file is one more than the
    /// height of the highest file that it imports. Files of a cycle have the same height.
    pub(super) fn order(&self) -> Vec<(usize, &str)> {
        let cycles = self.cycles();
        let mut heights: BTreeMap<&str, usize> = BTreeMap::new();
        while heights.len() < self.0.len() {
            for file in self.0.keys().map(String::as_str) {
                let alone = BTreeSet::from([file]);
                let group = cycles.iter().find(|c| c.contains(file)).unwrap_or(&alone);
                let below: Option<Vec<usize>> = group
                    .iter()
                    .flat_map(|member| self.imports(member))
                    .filter(|below| !group.contains(below))
                    .map(|below| heights.get(below).copied())
                    .collect();
                if let Some(below) = below {
                    let height = below.into_iter().max().map_or(0, |highest| highest + 1);
                    heights.extend(group.iter().map(|member| (*member, height)));
                }
            }
        }
        let mut order: Vec<_> = heights.into_iter().map(|(file, height)| (height, file)).collect();
        order.sort_unstable();
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_of(pairs: &[(&str, &str)]) -> Arrows {
        let mut arrows = Arrows::default();
        for (from, to) in pairs {
            arrows.add(to, to, String::new());
            arrows.add(from, to, format!("of_{to}"));
            arrows.0.entry((*to).to_owned()).or_default();
        }
        arrows
    }

    #[test]
    fn an_acyclic_graph_has_an_order() {
        let arrows = made_of(&[("a", "b"), ("a", "c"), ("b", "c")]);
        assert_eq!((arrows.files(), arrows.count()), (3, 3));
        assert!(arrows.cycles().is_empty());
        assert_eq!(arrows.order(), [(0, "c"), (1, "b"), (2, "a")]);
    }

    #[test]
    fn the_shortest_cycle_comes_first() {
        let arrows = made_of(&[("a", "b"), ("b", "c"), ("c", "a"), ("b", "a"), ("c", "d")]);
        let cycles = arrows.cycles();
        assert_eq!(cycles, [BTreeSet::from(["a", "b", "c"])]);
        let want = "  a -> b: of_b\n  b -> a: of_a\n  and among the same files:\n  \
            b -> c: of_c\n  c -> a: of_a\n";
        assert_eq!(arrows.describe(&cycles[0]), want);
        assert_eq!(arrows.order(), [(0, "d"), (1, "a"), (1, "b"), (1, "c")]);
    }
}
