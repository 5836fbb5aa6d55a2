//! The attacks.

mod admin;
mod commands;
mod descriptors;
pub(super) mod fuse;
mod maps;
mod messages;

use super::attack::Attack;

/// All of them, in the order in which they are made.
pub(crate) fn all() -> Vec<Attack> {
    let parts: [&[Attack]; 6] = [
        commands::ATTACKS,
        admin::ATTACKS,
        messages::ATTACKS,
        maps::ATTACKS,
        descriptors::ATTACKS,
        fuse::ATTACKS,
    ];
    parts.concat()
}
