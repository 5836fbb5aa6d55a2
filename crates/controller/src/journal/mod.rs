//! Journal: queue positions and commands in flight, for recovery from a killed process.
//!
//! The journal is a memory file (memfd) that outlives the process. I/O threads write it with plain
//! stores: no system call, no lock. Only the process dies, not the machine, so all executed stores
//! are visible to the recovering process, in their order.
//!
//! # Order of stores
//!
//! 1. A command with a request in flight is [recorded](JournalPart::record): a copy of its
//!    submission queue entry, because the host may overwrite the original, and the number of the
//!    command, counted from the creation of its queue.
//! 2. Completions are posted.
//! 3. The records of the posted commands are [freed](JournalPart::free).
//! 4. The position of the submission queue is stored: the number of posted completions first, then
//!    the number of fetched commands.
//! 5. The position of the completion queue is stored: the index of the next completion.
//!
//! No further command is fetched before step 5. (Each queue is served by one I/O thread.)
//!
//! # Recovery
//!
//! Completions that were posted after the last step 5 are found in the completion queue itself, by
//! their phase tags. Each contains the identifier of its command, and the head of its submission
//! queue when it was posted. If step 4 has counted a completion, the stored position is further
//! than that head. The commands to execute again are the recorded ones without a completion, and
//! all commands behind the position in the submission queue. The latter include commands that were
//! fetched and executed inline, but not posted: a second execution is equivalent to a late one. A
//! record of a command that is fetched again is ignored.
//!
//! If step 3 came before step 2, a command could be lost. If step 5 came before step 3, a completed
//! command could be executed again and overwrite newer data. If step 5 came before step 4, the same
//! could happen to commands that were executed inline. If step 4 did not count completions, a head
//! behind the stored position could not be distinguished from one almost a whole turn ahead of it.
//!
//! # Exclusive commands
//!
//! Decisions about an exclusive command are [stored](JournalPart::decide) in its record: first the
//! decision, then the flag that it exists. The decision about the first command of a fused
//! operation is stored last.
//!
//! # Commands that crash the process
//!
//! A command may be the cause of a crash. A record contains the number of processes that have
//! crashed with the command in flight. An unrecorded command is only known to be one of the burst
//! that begins at the stored position. So after a fault, the next process fetches the commands of
//! that burst one at a time, and [stores](JournalPart::store_trying) the number of each before it
//! starts it. `worker::recovery` evaluates these.

mod decision;
mod layout;
mod position;
mod recovered;
mod writer;

pub(crate) use decision::Decision;
pub(crate) use layout::{BURST, QUEUES, RecoveredCommand};
pub(crate) use position::Position;
pub(crate) use recovered::RecoveredJournal;
pub(crate) use writer::{Journal, JournalPart, Records};
