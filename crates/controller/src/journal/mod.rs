//! What changes with every command and has to survive this process, should it be killed: how far
//! the queues are, and which commands the disks have in hand.
//!
//! It lies in a memory file that outlives the process. A worker writes there with plain stores:
//! no system call, no lock. What is killed is a process and not the machine, so all stores that
//! were executed are found, in their order.
//!
//! # The order of stores
//!
//! 1. A command that a disk has taken in hand is [recorded](JournalPart::record): its own copy of
//!    the submission queue entry, for the host may put another one there, and which command of its
//!    queue it is, counted from the queue's creation.
//! 2. Completions are posted.
//! 3. The records of the commands that were among them are [freed](JournalPart::free).
//! 4. The position of the submission queue is stored: how many commands were fetched, and before
//!    that, how many completions are posted.
//! 5. The position of the completion queue is stored: where the next completion goes.
//!
//! Nothing more is fetched before 5 (by the worker that has the queues, which is one).
//!
//! # What is found
//!
//! Completions that were posted after the last 5 are seen in the completion queue itself, by their
//! phase tags. Each names its command, and says how far its submission queue had been fetched,
//! unless it is one of those that 4 has counted: then the stored position is further. So
//! what is to be done again are the recorded commands that are not among them, and all that follow
//! in the submission queue. What was fetched and executed at once, and not posted, is among the
//! latter: executing it once more is no different from executing it late. A record of a command
//! that would be fetched again does not count.
//!
//! Had 3 come before 2, a command would be lost; had 5 come before 3, one that is complete would be
//! executed again, over what was written since; had 5 come before 4, the same for commands that
//! were executed at once. If 4 did not count completions, a head that is behind the stored position
//! could not be told from one that is almost a round ahead of it.
//!
//! # Commands that are alone
//!
//! Of a command that is carried out alone it is [written down](JournalPart::decide) what was
//! decided: first what, then that there is something. Of the two of a fused operation the first is
//! the last.
//!
//! # Commands that kill
//!
//! A command may be what the process dies of. A record says how many processes have died that had
//! the command in hand. Of a command that is not recorded it is known only that it was one of the
//! burst that begins at the stored position. So after a fault the next process fetches those one at
//! a time, and [says](JournalPart::store_trying) which one before it starts it. What is made of
//! that is in `worker::recovery`.

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
