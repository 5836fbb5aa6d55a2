//! Capabilities of a server process: one capability, or several if the process creates its files
//! itself.

use rustix::io::{self, Errno};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};

/// Drops the capabilities of this thread, the only one of the process, except `CAP_SYS_RESOURCE`.
/// Without this capability, descriptors in sockets, such as those of a checkpoint, count against
/// the user's limit of open files. (No allowed system call changes a limit.) A process that creates
/// its files and sockets `by_itself` also keeps the capabilities for files, and with `tcp` the one
/// for low ports.
///
/// # Errors
/// The system's error.
pub(super) fn drop_all(by_itself: bool, tcp: bool) -> io::Result<()> {
    let mut needed = CapabilitySet::SYS_RESOURCE;
    if by_itself {
        needed |= CapabilitySet::CHOWN | CapabilitySet::FOWNER | CapabilitySet::DAC_OVERRIDE;
        needed |= CapabilitySet::DAC_READ_SEARCH;
        needed.set(CapabilitySet::NET_BIND_SERVICE, tcp);
    }
    let there = capabilities(None)?;
    match clear_ambient_capability_set() {
        // Kernels before 4.3 have no ambient set.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno),
    }
    if there.effective.contains(CapabilitySet::SETPCAP) {
        for bit in 0..u64::BITS {
            let capability = CapabilitySet::from_bits_retain(1 << bit);
            if needed.contains(capability) {
                continue;
            }
            match remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // The kernel has no capability with this number or a higher one.
                Err(Errno::INVAL) => break,
                Err(errno) => return Err(errno),
            }
        }
    }
    let (effective, permitted) = (there.effective & needed, there.permitted & needed);
    let sets = CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() };
    // The system call is left out if it changes nothing, because a service manager may forbid it.
    if sets == there { Ok(()) } else { set_capabilities(None, sets) }
}
