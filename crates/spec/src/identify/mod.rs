//! Data structures of the Identify command: 4096 bytes each. Base 2.1, 5.1.13 "Identify command".
//!
//! | CNS | structure |
//! |---|---|
//! | 00h, 11h | [`IdentifyNamespace`] |
//! | 01h | [`IdentifyController`] |
//! | 02h, 07h, 10h, 1Ah | [`NamespaceList`] |
//! | 03h | namespace identification descriptors: [`NamespaceIds`] |
//! | 05h, 1Bh | [`IdentifyNvmNamespace`] (of the NVM command set) |
//! | 06h | [`IdentifyNvmController`] (of the NVM command set) |
//! | 08h | [`IdentifyIndependentNamespace`] |
//! | 12h, 13h | [`ControllerList`] |
//! | 1Ch | [`IoCommandSets`] |

mod codes;
mod controller;
mod controller_bits;
mod created;
mod lists;
mod namespace;
mod namespace_ids;
mod power;
mod text;

pub use codes::{IDENTIFY_SIZE, cns, csi};
pub use controller::{IdentifyController, IdentifyNvmController};
pub use controller_bits::{
    Cmic, ControllerType, Ctratt, EntrySizes, Fna, Frmw, Lpa, Oacs, Oaes, Oncs, Sanicap, Sgls, Vwc,
};
pub use created::NamespaceToCreate;
pub use lists::{ControllerList, IoCommandSets, NamespaceList};
pub use namespace::{
    Dlfeat, Dpc, Dps, Flbas, IdentifyIndependentNamespace, IdentifyNamespace, IdentifyNvmNamespace,
    LbaFormat, Mc, Nmic, Nsfeat,
};
pub use namespace_ids::{NamespaceId, NamespaceIds};
pub use power::{PowerFlags, PowerState};
pub use text::{Text, ascii_field, nqn_field};
