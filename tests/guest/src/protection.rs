//! A namespace with protection information under Linux's block layer and nvme-cli.

use anyhow::{Result, ensure};
use shadowbell_guest::Guest;
use shadowbell_testing::wait::LIMIT;

use super::nvme_cli::{nvme, refused};

/// LBA format 2 of a pool: 512 bytes of data and 8 of metadata.
const FORMAT: u32 = 2;
const BLOCKS: u64 = 16384;

const GUARD_CHECK: u16 = 0x282;
const INVALID_PROTECTION_INFORMATION: u16 = 0x181;

/// Creates namespace `nsid` with protection type 1, whose block device is `name`, uses it, and
/// deletes it.
pub(super) fn check(guest: &mut Guest, nsid: u32, name: &str) -> Result<()> {
    let size = format!("--nsze={BLOCKS} --ncap={BLOCKS}");
    nvme(guest, &format!("create-ns /dev/nvme0 {size} --flbas={FORMAT} --dps=1"))?;
    nvme(guest, &format!("attach-ns /dev/nvme0 -n {nsid} -c 1"))?;
    // The kernel's block layer generates the protection information of writes, and checks it on
    // reads.
    let integrity = format!(
        "for try in $(seq 600); do [ -b /dev/{name} ] && break; sleep 0.1; done; \
         cd /sys/block/{name}/integrity && cat format tag_size read_verify write_generate"
    );
    let found = guest.sh(&integrity, LIMIT)?;
    ensure!(found.contains("T10-DIF-TYPE1-CRC"), "the kernel has {found}");
    guest.sh(
        &format!(
            "dd if=/tmp/data of=/dev/{name} bs=1M oflag=direct 2>/dev/null && \
             dd if=/dev/{name} bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/data"
        ),
        LIMIT,
    )?;
    let fio = format!(
        "fio --name=verify --filename=/dev/{name} --rw=randwrite --bs=4k --size=4m --direct=1 \
         --ioengine=libaio --iodepth=16 --verify=crc32c --do_verify=1 --verify_fatal=1"
    );
    guest.sh(&fio, LIMIT)?;
    // nvme-cli command for block 5. With protection type 1, the reference tag must equal the block
    // number.
    let block = |command: &str, prinfo: u32, tag: u32, metadata: &str| {
        format!(
            "{command} /dev/{name} --start-block=5 --block-count=0 --data-size=512 \
             --metadata-size=8 --data=/tmp/block --metadata={metadata} --prinfo={prinfo} \
             --ref-tag={tag}"
        )
    };
    nvme(guest, &block("read", 7, 5, "/tmp/good"))?;
    let tag = guest.sh("od -An -tx1 -j4 -N4 /tmp/good", LIMIT)?;
    ensure!(tag.split_whitespace().eq(["00", "00", "00", "05"]), "the reference tag is {tag}");
    // A read with another reference tag is refused with protection type 1.
    refused(guest, &block("read", 1, 6, "/tmp/other"), &[INVALID_PROTECTION_INFORMATION])?;
    // A write with correct protection information succeeds. A write with a wrong guard fails.
    nvme(guest, &block("write", 7, 5, "/tmp/good"))?;
    guest.sh(
        "cp /tmp/good /tmp/wrong && printf '\\377\\376' | \
              dd of=/tmp/wrong bs=1 conv=notrunc 2>/dev/null",
        LIMIT,
    )?;
    refused(guest, &block("write", 4, 5, "/tmp/wrong"), &[GUARD_CHECK])?;
    // A write without checks stores the wrong guard. A read that checks the guard detects it.
    nvme(guest, &block("write", 0, 5, "/tmp/wrong"))?;
    refused(guest, &block("read", 4, 5, "/tmp/other"), &[GUARD_CHECK])?;
    nvme(guest, &block("write", 7, 5, "/tmp/good"))?;
    nvme(guest, &format!("delete-ns /dev/nvme0 -n {nsid}")).map(drop)
}
