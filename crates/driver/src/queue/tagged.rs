//! Submission queue entries with tags of protection information and a metadata pointer, beyond
//! dwords 10 to 13.
//!
//! A command with tags has marks in the upper bits of its transfer length. So its length exceeds
//! every limit, and the fast path refuses the command as too long. Only refused commands are
//! examined for tags, so commands without tags cost nothing extra. Tags that cannot be derived from
//! the command are in a table by slot, for a possible second submission. The table is allocated
//! when the first command needs it.

use super::core::Core;
use crate::command::{Command, TagSource, Token};
use crate::dma::Buffer;
use crate::error::{QueueError, Refused};
use crate::metadata::{MetadataCommand, Tags};

impl Core {
    /// Submits a command that the fast path has refused for `reason`, if the command has tags.
    #[cold]
    #[inline(never)]
    pub(super) fn submit_refused_by_fast_path(
        &mut self,
        slot: u16,
        reason: QueueError,
        buffer: Option<Buffer>,
        parts: [u64; 4],
    ) -> Result<Token, Box<Refused>> {
        let command = Command::from_parts(parts);
        match command.tag_source() {
            TagSource::LbaTag(_) => self.submit_tagged(slot, buffer, command).map_err(Box::new),
            // A `Given` command without stored tags is refused: only `submit_with_tags` can submit
            // it.
            TagSource::Nothing | TagSource::Given => {
                Err(Box::new(self.refuse(slot, Some(reason), buffer)))
            }
        }
    }

    /// Submits a command with its tags and metadata pointer.
    #[inline(never)]
    pub(crate) fn submit_with_tags(
        &mut self,
        given: &MetadataCommand,
        buffer: Option<Buffer>,
    ) -> Result<Token, Refused> {
        let Some(slot) = self.free.pop() else { return Err(self.refuse_full(buffer)) };
        if self.tags.is_empty() {
            self.tags = vec![Tags::default(); self.slots.len()].into();
        }
        if let Some(tags) = self.tags.get_mut(usize::from(slot)) {
            *tags = given.tags();
        }
        self.submit_tagged(slot, buffer, given.command)
    }

    fn submit_tagged(
        &mut self,
        slot: u16,
        buffer: Option<Buffer>,
        command: Command,
    ) -> Result<Token, Refused> {
        let words = match self.entry_of(slot, &command, buffer.as_ref()) {
            Ok(words) if self.failed.is_none() => words,
            Ok(_) => return Err(self.refuse(slot, None, buffer)),
            Err(reason) => return Err(self.refuse(slot, Some(reason), buffer)),
        };
        Ok(self.push_slot(slot, words, buffer, command))
    }

    /// Builds the entry of a command in `slot`, without its identifier.
    pub(super) fn entry_of(
        &mut self,
        slot: u16,
        command: &Command,
        buffer: Option<&Buffer>,
    ) -> Result<[u64; 8], QueueError> {
        let mut words = command.words();
        let tags = match command.tag_source() {
            TagSource::Nothing => Tags::default(),
            TagSource::LbaTag(guard) => Tags::of(command.lba_tag(guard)),
            TagSource::Given => self.tags.get(usize::from(slot)).copied().unwrap_or_default(),
        };
        let bytes = command.transfer_bytes();
        if bytes != 0 {
            (words[3], words[4]) = self.prps(slot, buffer, command.offset, bytes)?;
        }
        if let Some((at, len)) = tags.metadata {
            words[2] = metadata_pointer(buffer, at, len)?;
        }
        (words[1], words[7]) = (tags.cdw2_3, tags.cdw14_15);
        Ok(words)
    }
}

/// The metadata pointer (MPTR), after a check against the buffer's length.
fn metadata_pointer(buffer: Option<&Buffer>, at: u32, needed: u32) -> Result<u64, QueueError> {
    let len = buffer.map_or(0, Buffer::len);
    let fits = u64::from(at) + u64::from(needed) <= len as u64;
    let Some(buffer) = buffer.filter(|_| fits) else {
        return Err(QueueError::BufferTooShort { needed, offset: at, len });
    };
    // "The metadata pointer is aligned to a dword" (Base 2.1, Common Command Format, MPTR).
    if !at.is_multiple_of(4) {
        return Err(QueueError::Misaligned { offset: at });
    }
    Ok(buffer.iova() + u64::from(at))
}
