//! Description of an attached controller for the log.

use crate::queue_options::doorbells_name;
use shadowbell_driver::{BlockMetadata, Controller, QueueMap, Steered};
use shadowbell_spec::protection::GuardKind;
use shadowbell_spec::regs::Vs;

/// Lines about a controller: identity, capabilities, requested and granted queue pairs, assignment
/// of CPUs to queue pairs, namespaces. `requested` is the number of queue pairs in the request, and
/// `steered` the result of setting the affinity of kernel interrupts.
#[must_use]
pub(crate) fn banner(
    controller: &Controller,
    requested: u16,
    steered: Option<&Steered>,
) -> Vec<String> {
    let (identity, cap) = (controller.identity(), controller.capabilities());
    let page = |exponent: u8| binary(1u64 << (12 + u32::from(exponent)));
    let mut lines = vec![
        format!(
            "{}: {}, serial {}, firmware {}",
            controller.name(),
            identity.model(),
            identity.serial(),
            identity.firmware()
        ),
        format!(
            "  NVMe {}, CAP {:#018x}: MQES {}, pages of {} to {}, doorbells every {} bytes; up to {} \
             a command",
            version(controller.version()),
            cap.into_bits(),
            u32::from(cap.mqes()) + 1,
            page(cap.mpsmin()),
            page(cap.mpsmax()),
            4u32 << cap.dstrd(),
            binary(controller.max_transfer_bytes())
        ),
        format!(
            "  {requested} queue pair{} requested, {} granted, of {} entries; {}, {} doorbells",
            if requested == 1 { "" } else { "s" },
            controller.queue_pairs(),
            controller.queue_depth(),
            if controller.has_interrupts() { "interrupts" } else { "polling" },
            doorbells_name(controller.doorbells())
        ),
    ];
    let map = QueueMap::of_this_machine(controller.queue_pairs());
    lines.push(format!("  queue map: {map}{}", interrupts(steered)));
    lines.extend(controller.namespaces().iter().map(|namespace| {
        format!(
            "  namespace {}: {}, {} blocks of {} bytes{}{}{}",
            namespace.nsid(),
            binary(namespace.bytes()),
            namespace.blocks(),
            namespace.block_size(),
            namespace.metadata().map(metadata).unwrap_or_default(),
            if namespace.is_read_only() { ", read-only" } else { "" },
            namespace.unusable().map(|what| format!(", unusable: it {what}")).unwrap_or_default()
        )
    }));
    lines
}

/// Description of a block's metadata.
fn metadata(metadata: &BlockMetadata) -> String {
    let place = if metadata.is_extended() { ", at the end of each" } else { "" };
    let bytes = format!(" and {} of metadata{place}", metadata.size());
    match metadata.protection() {
        0 => bytes,
        pi => {
            let bits = if metadata.guard() == GuardKind::Crc64 { 64 } else { 16 };
            format!("{bytes}, protection information of type {pi}, guards of {bits} bits")
        }
    }
}

/// Description of the interrupt affinity.
fn interrupts(steered: Option<&Steered>) -> String {
    match steered {
        None | Some(Steered::All(0)) => String::new(),
        Some(Steered::All(1)) => "; its interrupt goes there".into(),
        Some(Steered::All(_)) => "; their interrupts go there".into(),
        Some(Steered::Refused { path, source }) => {
            format!("; interrupt affinity unchanged: {}: {source}", path.display())
        }
    }
}

/// Version as text: `1.4`, `1.3.1`.
fn version(version: Vs) -> String {
    match version.ter() {
        0 => format!("{}.{}", version.mjr(), version.mnr()),
        ter => format!("{}.{}.{ter}", version.mjr(), version.mnr()),
    }
}

fn binary(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_interrupt_affinity_is_reported() {
        assert_eq!(interrupts(None), "");
        assert_eq!(interrupts(Some(&Steered::All(2))), "; their interrupts go there");
        let source = std::io::ErrorKind::PermissionDenied.into();
        let refused = Steered::Refused { path: "/proc/irq/25/smp_affinity_list".into(), source };
        let text = interrupts(Some(&refused));
        assert!(text.contains("unchanged") && text.contains("/proc/irq/25"), "{text}");
    }

    #[test]
    fn versions_are_printed_without_a_zero_tertiary_number() {
        assert_eq!(version(Vs::of(1, 4, 0)), "1.4");
        assert_eq!(version(Vs::of(1, 2, 1)), "1.2.1");
        assert_eq!(binary(4096), "4.0 KiB");
    }
}
