//! Writer in the guest that reports every acknowledged write; see [`shadowbell_guest::ack`].

use shadowbell_testing::wait;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use shadowbell_guest::ack::Acknowledged;
use shadowbell_guest::{Guest, RunDir, tool};
use shadowbell_testing::wait::LIMIT;

/// Number of slots of 4 KiB that are overwritten, from the start of the disk.
pub(crate) const SLOTS: u64 = 2048;
/// Seed of the patterns. It identifies the writes of this program.
const SEED: u64 = 0x5bac_ced0;
/// Number of generation values that each session reserves. A session writes to a slot less often
/// than this.
const GENERATIONS: u64 = 1 << 32;

/// Sessions of the writer on one image.
pub(crate) struct Writer {
    image: PathBuf,
    log: PathBuf,
    sessions: u64,
}

impl Writer {
    /// Creates a writer for this image, the backing file of the guest's disk.
    pub(crate) fn new(run: &RunDir, image: &Path) -> Self {
        Self { image: image.to_owned(), log: run.file("ack.log"), sessions: 0 }
    }

    /// Starts a session in the background and waits until writes are being acknowledged.
    pub(crate) fn start(&mut self, guest: &mut Guest, disk: &str, seconds: u64) -> Result<()> {
        let before = self.acknowledged()?.writes;
        // Each session uses higher generations than all sessions before it. So a slot with an older
        // generation shows that a stale write has overwritten it.
        let generation = self.sessions * GENERATIONS;
        self.sessions += 1;
        guest.sh(
            &format!(
                "rm -f /tmp/writer.done; \
                 ({} write device=/dev/{disk} slots={SLOTS} threads=8 seconds={seconds} seed={SEED} \
                  generation={generation} acknowledge=/dev/ttyS2 >/tmp/writer.out 2>&1; \
                  echo $? >/tmp/writer.done) &",
                tool::NAME
            ),
            LIMIT,
        )?;
        let deadline = Instant::now() + LIMIT;
        while self.acknowledged()?.writes < before + 50 {
            if Instant::now() > deadline {
                let said = guest.sh("cat /tmp/writer.out", LIMIT)?;
                bail!("no write was acknowledged; output of the writer: {said}");
            }
            wait::pause();
        }
        Ok(())
    }

    /// Waits for the end of the session. Fails if a write or a read has failed.
    pub(crate) fn join(&mut self, guest: &mut Guest) -> Result<()> {
        let wait = "for try in $(seq 1200); do [ -e /tmp/writer.done ] && break; sleep 0.1; done; \
                    cat /tmp/writer.out; exit $(cat /tmp/writer.done || echo 99)";
        guest.sh(wait, LIMIT).context("the writer failed").map(drop)
    }

    /// Compares the image with all writes that were acknowledged in all sessions. Returns the
    /// number of these writes.
    pub(crate) fn verify(&self) -> Result<u64> {
        let acknowledged = self.acknowledged()?;
        if acknowledged.slots.is_empty() {
            bail!("no write was ever acknowledged");
        }
        if !acknowledged.failures.is_empty() {
            bail!("in the guest: {}", acknowledged.failures.join("; "));
        }
        let broken = acknowledged.broken(&self.image, SEED)?;
        if !broken.is_empty() {
            let some = broken.iter().take(8).cloned().collect::<Vec<_>>().join("\n");
            bail!("{} of {} slots are broken:\n{some}", broken.len(), acknowledged.slots.len());
        }
        Ok(acknowledged.writes)
    }

    /// Writes that were acknowledged so far.
    fn acknowledged(&self) -> Result<Acknowledged> {
        let log = match fs::read(&self.log) {
            Ok(log) => log,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).with_context(|| self.log.display().to_string()),
        };
        Ok(Acknowledged::parse(&String::from_utf8_lossy(&log)))
    }
}

/// Fills guest memory that was recently freed, and checks that its content does not change. A
/// change would be a DMA write for a command that a reset has ended.
pub(crate) fn patrol(guest: &mut Guest) -> Result<()> {
    guest
        .sh(&format!("{} patrol mib=384 seconds=3", tool::NAME), LIMIT)
        .context("a stale write into the guest's memory")
        .map(drop)
}
