//! Detection of image formats by their first bytes.

use std::fmt;

/// Disk image format other than raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageFormat {
    /// QEMU qcow2, versions 2 and 3.
    Qcow2,
    /// QEMU qcow, version 1.
    Qcow,
    /// QEMU QED ("enhanced disk").
    Qed,
    /// VMware VMDK.
    Vmdk,
    /// VirtualBox VDI.
    Vdi,
    /// Hyper-V VHDX.
    Vhdx,
    /// Virtual PC VHD of dynamic size. A VHD of fixed size starts like a raw image.
    Vhd,
}

impl ImageFormat {
    /// Number of bytes from the start of an image that the detection needs.
    pub const DETECTION_BYTES: usize = 512;

    /// Detects the format by the first bytes of an image; `None` means raw.
    #[must_use]
    pub fn of(start: &[u8]) -> Option<Self> {
        match start {
            [b'Q', b'F', b'I', 0xfb, 0, 0, 0, 1, ..] => Some(Self::Qcow),
            [b'Q', b'F', b'I', 0xfb, ..] => Some(Self::Qcow2),
            [b'Q', b'E', b'D', 0, ..] => Some(Self::Qed),
            [b'K', b'D', b'M', b'V', ..] | [b'C', b'O', b'W', b'D', ..] => Some(Self::Vmdk),
            _ if start.starts_with(b"# Disk DescriptorFile") => Some(Self::Vmdk),
            _ if start.starts_with(b"vhdxfile") => Some(Self::Vhdx),
            _ if start.starts_with(b"conectix") => Some(Self::Vhd),
            _ if start.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]) => Some(Self::Vdi),
            _ => None,
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qcow2 => "qcow2",
            Self::Qcow => "qcow",
            Self::Qed => "QED",
            Self::Vmdk => "VMDK",
            Self::Vdi => "VDI",
            Self::Vhdx => "VHDX",
            Self::Vhd => "VHD",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_formats_are_detected_by_their_first_bytes() {
        let mut vdi = [0; ImageFormat::DETECTION_BYTES];
        vdi[0x40..0x44].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
        for (start, format) in [
            (&b"QFI\xfb\0\0\0\x03"[..], Some(ImageFormat::Qcow2)),
            (b"QFI\xfb\0\0\0\x02", Some(ImageFormat::Qcow2)),
            (b"QFI\xfb\0\0\0\x01", Some(ImageFormat::Qcow)),
            // A qcow2 image of an unknown version must not count as a raw image.
            (b"QFI\xfb", Some(ImageFormat::Qcow2)),
            (b"QED\0", Some(ImageFormat::Qed)),
            (b"KDMV\x01\0\0\0", Some(ImageFormat::Vmdk)),
            (b"# Disk DescriptorFile\nversion=1\n", Some(ImageFormat::Vmdk)),
            (&vdi, Some(ImageFormat::Vdi)),
            (b"vhdxfile", Some(ImageFormat::Vhdx)),
            (b"conectix", Some(ImageFormat::Vhd)),
            (b"", None),
            (b"QFI", None),
            (&[0; 512], None),
            // Raw images: a boot sector, and a LUKS disk that the guest encrypts itself.
            (b"\xeb\x63\x90\x10\x8e\xd0\xbc\0", None),
            (b"LUKS\xba\xbe\0\x02", None),
        ] {
            assert_eq!(ImageFormat::of(start), format, "{start:?}");
        }
    }
}
