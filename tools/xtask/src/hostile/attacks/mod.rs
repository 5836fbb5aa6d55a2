//! The attacks.

mod admin;
mod commands;
mod descriptors;
mod exports;
pub(super) mod fuse;
mod maps;
mod messages;

use super::attack::Attack;

/// Peers of the same kind each.
const PARTS: [&[Attack]; 7] = [
    commands::ATTACKS,
    admin::ATTACKS,
    messages::ATTACKS,
    maps::ATTACKS,
    descriptors::ATTACKS,
    fuse::ATTACKS,
    exports::ATTACKS,
];

/// All of them, in the order in which they are made.
pub(crate) fn all() -> Vec<Attack> {
    PARTS.concat()
}

#[cfg(test)]
mod tests {
    use super::super::attack::Kind;
    use super::*;

    #[test]
    fn names_are_unique_and_the_short_suite_is_short_and_has_some_of_every_kind() {
        let names: std::collections::HashSet<_> = all().iter().map(|attack| attack.name).collect();
        assert_eq!(names.len(), all().len());
        // But for exports: a client of one was held up for 313 ms on a machine with four times as many
        // threads that run as processors, and a test must not fail of that.
        let exports = |part: &[Attack]| part.iter().all(|attack| attack.kind == Kind::Export);
        let has_short = |part: &[Attack]| part.iter().any(|attack| attack.is_short);
        assert!(PARTS.iter().all(|part| has_short(part) != exports(part)));
        // Two seconds each, and some are made twice.
        assert!(all().iter().filter(|attack| attack.is_short).count() <= 15);
    }
}
