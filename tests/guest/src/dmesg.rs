//! Reads the guest kernel's log.

use anyhow::{Result, bail};
use shadowbell_guest::{Guest, config};

/// Lines of level warning or worse about NVMe or the PCI functions of the controllers. `log` has
/// numeric levels as prefixes, as `dmesg -r` prints them.
fn complaints(log: &str, addresses: &[String]) -> Vec<String> {
    log.lines()
        .filter(|line| {
            let about_nvme = line.to_lowercase().contains("nvme")
                || addresses.iter().any(|address| line.contains(address.as_str()));
            level(line) <= 4 && about_nvme
        })
        .map(str::to_owned)
        .collect()
}

/// Level of a line: 4 is a warning, lower numbers are worse.
pub(crate) fn level(line: &str) -> u32 {
    // The number in the prefix is facility * 8 + level.
    line.strip_prefix('<')
        .and_then(|rest| rest.split_once('>'))
        .and_then(|(number, _)| number.parse::<u32>().ok())
        .map_or(7, |number| number & 7)
}

/// Fails with the kernel's warnings about the first `devices` controllers, if there are any.
pub(crate) fn clean(guest: &mut Guest, devices: usize) -> Result<()> {
    clean_in(&guest.dmesg()?, devices)
}

/// Checks the lines `log` in the way in which [`clean`] checks the whole kernel log.
pub(crate) fn clean_in(log: &str, devices: usize) -> Result<()> {
    let addresses: Vec<_> = (0..devices).map(config::pci_address).collect();
    let found = complaints(log, &addresses);
    if !found.is_empty() {
        bail!("the kernel logged warnings:\n{}", found.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_about_the_disk_are_found_and_others_are_not() {
        let log = "<6>[    1.0] nvme nvme0: pci function 0000:00:04.0\n\
                   <4>[    1.1] nvme nvme0: I/O tag 1 timeout, aborting\n\
                   <4>[    1.2] clocksource: something\n\
                   <27>[    1.3] nvme nvme0: Device not ready\n\
                   <3>[    1.4] pci 0000:00:04.0: BAR 0: no space\n\
                   <5>[    1.5] NVMe note\n\
                   nvme without a level\n";
        let found = complaints(log, &["0000:00:04.0".to_owned()]);
        assert_eq!(found.len(), 3, "{found:#?}");
        assert!(found[0].contains("timeout") && found[1].contains("ready"));
        assert!(found[2].contains("BAR"));
    }
}
