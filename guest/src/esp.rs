//! UEFI boot disk: a partition table with one EFI system partition. The partition contains a
//! unified kernel image (kernel, initramfs and command line in one PE file with systemd's stub) at
//! the default path `EFI/BOOT/BOOTX64.EFI`.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::config::{FILES, KERNEL_WORDS, Kernel};
use crate::host::last_lines;
use crate::roots::Roots;
use crate::rundir::RunDir;

/// Script that builds the image inside the tools root. Sections of a PE file must not overlap in
/// memory and must be in ascending order, so each begins on the page after the previous one.
const SCRIPT: &str = r#"
set -eu
cd "$1"; image=$2; size=$3
stub=/usr/lib/systemd/boot/efi/linuxx64.efi.stub
place=$(objdump -h "$stub" | awk '$1 ~ /^[0-9]+$/ { size = $3; place = $4 } END { print "0x" size, "0x" place }')
next=$(( (${place% *} + ${place#* } + 4095) / 4096 * 4096 ))
set --
for part in osrel cmdline initrd linux; do
    set -- "$@" --add-section ".$part=uki.$part" --change-section-vma ".$part=$next"
    next=$(( (next + $(stat -c %s "uki.$part") + 4095) / 4096 * 4096 ))
done
objcopy "$@" "$stub" uki.efi

truncate -s "$size" "$image"
# The partition begins at 1 MiB and ends 1 MiB before the disk does (the second partition table).
sfdisk --quiet "$image" <<END
label: gpt
start=2048, size=$(( size / 512 - 4096 )), type=uefi, name=shadowbell-esp
END
mformat -i "$image@@1M" -T $(( size / 512 - 4096 )) -F -v SHADOWBELL ::
mmd -i "$image@@1M" ::/EFI ::/EFI/BOOT
mcopy -i "$image@@1M" uki.efi ::/EFI/BOOT/BOOTX64.EFI
rm uki.*
"#;

/// Makes the image `name` of `bytes` bytes in the run's directory of files. `words` are
/// additional kernel parameters, `initramfs` is an archive of [`crate::initramfs::pack`].
pub fn build(
    roots: &Roots,
    run: &RunDir,
    name: &str,
    bytes: u64,
    kernel: Kernel,
    words: &str,
    initramfs: &[u8],
) -> Result<()> {
    fs::copy(roots.kernel(kernel)?, run.file("uki.linux")).context("the kernel")?;
    fs::write(run.file("uki.initrd"), initramfs)?;
    fs::write(run.file("uki.cmdline"), format!("{KERNEL_WORDS} {words}"))?;
    fs::write(run.file("uki.osrel"), "ID=shadowbell\nNAME=Shadowbell test guest\nVERSION_ID=1\n")?;
    let output = roots
        .command(&[(run.files(), FILES)], "sh")?
        .args(["-c", SCRIPT, "sh", FILES, name, &bytes.to_string()])
        .output()
        .context("building the boot disk")?;
    if !output.status.success() {
        bail!("building the boot disk: {}", last_lines(&output.stderr, 8));
    }
    Ok(())
}
