//! List of the attacks.

mod admin;
mod commands;
mod descriptors;
mod exports;
pub(super) mod fuse;
pub(super) mod isolation;
mod maps;
mod messages;

use super::attack::Attack;

/// Attacks, grouped by type of peer and request.
const PARTS: [&[Attack]; 8] = [
    commands::ATTACKS,
    admin::ATTACKS,
    messages::ATTACKS,
    maps::ATTACKS,
    descriptors::ATTACKS,
    fuse::ATTACKS,
    exports::ATTACKS,
    isolation::ATTACKS,
];

/// All attacks, in the order in which they run.
pub fn all() -> Vec<Attack> {
    PARTS.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_short_suite_is_short_and_has_some_of_every_kind() {
        let names: std::collections::HashSet<_> = all().iter().map(|attack| attack.name).collect();
        assert_eq!(names.len(), all().len());
        let has_short = |part: &[Attack]| part.iter().any(|attack| attack.is_short);
        assert!(PARTS.iter().all(|part| has_short(part)));
        // Each short attack takes about two seconds, and some are repeated.
        assert!(all().iter().filter(|attack| attack.is_short).count() <= 25);
    }
}
