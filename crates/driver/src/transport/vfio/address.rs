//! PCI addresses.

use std::fmt;
use std::str::FromStr;

/// Address of a PCI function: domain, bus, device and function. Formatted like in the kernel:
/// `0000:01:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = String;

    /// Parses `0000:01:00.0`, or `01:00.0` without the domain; all digits are hexadecimal.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is no PCI address; write for example `0000:01:00.0`");
        let (place, function) = text.rsplit_once('.').ok_or_else(bad)?;
        let (bus, device) = place.rsplit_once(':').ok_or_else(bad)?;
        let (domain, bus) = bus.rsplit_once(':').unwrap_or(("0", bus));
        // PCI domains of virtual host bridges can have more than four digits.
        let field = |digits: &str, width: usize, max: u32| {
            let hexadecimal = digits.bytes().all(|b| b.is_ascii_hexdigit());
            let fits = !digits.is_empty() && digits.len() <= width && hexadecimal;
            fits.then(|| u32::from_str_radix(digits, 16).ok()).flatten().filter(|v| *v <= max)
        };
        let small =
            |digits, width, max| -> Option<u8> { field(digits, width, max)?.try_into().ok() };
        Ok(Self {
            domain: field(domain, 8, u32::MAX).ok_or_else(bad)?,
            bus: small(bus, 2, 0xff).ok_or_else(bad)?,
            device: small(device, 2, 0x1f).ok_or_else(bad)?,
            function: small(function, 1, 7).ok_or_else(bad)?,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_parsed_in_both_forms() {
        for (text, full) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("01:00.0", "0000:01:00.0"),
            ("1:2.3", "0000:01:02.3"),
            ("10000:e1:1f.7", "10000:e1:1f.7"),
            ("0:FF:0A.0", "0000:ff:0a.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), full, "{text}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            ".",
            ":.",
            "01:00",
            "01.0",
            "0000:01:00.8",
            "0000:01:20.0",
            "0000:100:00.0",
            "0:0:0:0.0",
            "0000:01:00.0/1",
            "+1:00.0",
            "0000:01:00.-1",
            "123456789:01:00.0",
            "../../x:0.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert!(error.contains("0000:01:00.0"), "{text}: {error}");
        }
    }
}
