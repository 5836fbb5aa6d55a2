//! The attacks.

mod admin;
mod commands;
mod descriptors;
mod exports;
pub(super) mod fuse;
mod maps;
mod messages;

use super::attack::Attack;

/// All of them, in the order in which they are made.
pub(crate) fn all() -> Vec<Attack> {
    let parts: [&[Attack]; 7] = [
        commands::ATTACKS,
        admin::ATTACKS,
        messages::ATTACKS,
        maps::ATTACKS,
        descriptors::ATTACKS,
        fuse::ATTACKS,
        exports::ATTACKS,
    ];
    parts.concat()
}
