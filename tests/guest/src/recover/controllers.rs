//! Controllers of the suite `recover`, and the faults that each injects.

use shadowbell_guest::config;

/// All recoverable faults, each of which is injected many times. The driver recovers from them in
/// three steps. It aborts a hung command. If a command is lost, or its completion is not visible,
/// it creates a new queue pair. If the controller refuses the new queue pair, or reports a fatal
/// state, it resets the controller.
const FAULTS: &str = "seed=2604,fatal:every=4000,subsystem-reset:every=9000,\
    wrong-phase:every=2500,hang:rate=1/250,drop-before:rate=1/400,drop-after:rate=1/400,\
    stall=25ms:rate=1/300,delay=20ms:rate=1/300,duplicate:rate=1/200,corrupt:rate=1/200,\
    wrong-cid:rate=1/300,wrong-head:rate=1/400,wrong-sq-id:rate=1/400,status=0x006:rate=1/400,\
    refuse=0x08:every=7,ignore=0x08:every=9,refuse=0x00:every=7,refuse=0x05:every=11";
/// Permanent removal of the controller.
const REMOVAL: &str = "removal:at=1500";

/// Controllers, in the order of their PCI addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Qemu,
    Shadowbell,
    /// Injects recoverable faults repeatedly.
    Faulty,
    /// Is removed during the load.
    Removed,
}

impl Which {
    pub(crate) const ALL: [Self; 4] = [Self::Qemu, Self::Shadowbell, Self::Faulty, Self::Removed];

    pub(crate) fn address(self) -> String {
        config::pci_address(Self::ALL.iter().position(|which| *which == self).unwrap_or_default())
    }

    pub(crate) fn target(self) -> String {
        format!("nvme://{}", self.address())
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Shadowbell => "ours",
            Self::Faulty => "faulty",
            Self::Removed => "removed",
        }
    }

    pub(crate) fn faults(self) -> Option<&'static str> {
        match self {
            Self::Qemu | Self::Shadowbell => None,
            Self::Faulty => Some(FAULTS),
            Self::Removed => Some(REMOVAL),
        }
    }
}
