//! Confirmation before a disk with content is overwritten.

use crate::session::Session;
use crate::transfer::disk::DiskReader;
use anyhow::anyhow;
use shadowbell_config::target::Target;
use shadowbell_driver::AttachOptions;
use shadowbell_process::exit::bad_input;
use shadowbell_signature::{Found, SPAN, find};

/// Confirmation option of verbs that overwrite their target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct Overwrite {
    /// Overwrite the target even if it holds a file system or a partition table
    #[arg(long)]
    pub(crate) force: bool,
}

impl Overwrite {
    /// Refuses a target with a file system or a partition table, unless `--force` is given.
    /// Attaches to the target in a session of its own. This session ends before the verb's session
    /// begins.
    ///
    /// # Errors
    /// With exit status [`BAD_INPUT`] if the target has content; errors of [`Session::attach`].
    ///
    /// [`BAD_INPUT`]: shadowbell_process::exit::BAD_INPUT
    pub(crate) fn check(self, target: &Target) -> anyhow::Result<()> {
        // A `mem:` or `null:` disk begins empty, so it has no content to lose.
        let is_new = |disk: &str| ["mem:", "null:"].iter().any(|kind| disk.starts_with(kind));
        if self.force || matches!(target, Target::Local { disk } if is_new(disk)) {
            return Ok(());
        }
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let mut session = Session::attach(target, &options)?;
        let found = detect_content(&mut session);
        session.detach()?;
        match found {
            Ok(None) => Ok(()),
            Ok(Some(found)) => Err(bad_input(anyhow!(
                "{target} holds {found}, which would be overwritten; name another target, or \
                 confirm with `--force`"
            ))),
            Err(error) => {
                tracing::warn!("{target}: cannot check for existing content: {error:#}");
                Ok(())
            }
        }
    }
}

/// Detects a file system or partition table in the namespace.
fn detect_content(session: &mut Session) -> anyhow::Result<Option<Found>> {
    let namespace = session.namespace()?.clone();
    let bytes = namespace.bytes();
    let span = bytes.min((SPAN as u64).next_multiple_of(namespace.block_size().into()));
    let mut reader = DiskReader::open(session, namespace, 0, span)?;
    let first = reader.rest()?;
    reader.seek(bytes - span, span)?;
    Ok(find(bytes, &first, &reader.rest()?)?)
}
