//! What can go wrong, and when.

use shadowbell_spec::status::Status;
use std::time::Duration;

/// What goes wrong. See the [module](super) for what each of these does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A command vanishes before it is carried out.
    DropBefore,
    /// A command's completion vanishes.
    DropAfter,
    /// A command stays until it is aborted, or for so long: then it ends with an error.
    Hang(Option<Duration>),
    /// A command is carried out late, with the memory as it is then.
    Stall(Duration),
    /// A completion comes late.
    Delay(Duration),
    /// A completion comes twice.
    Duplicate,
    /// A completion has flipped bits; never those that say which command it is of.
    Corrupt,
    /// A completion of no command.
    WrongCid,
    /// A completion that can not be seen.
    WrongPhase,
    /// A submission queue head outside of the queue.
    WrongHead,
    /// Another submission queue's identifier.
    WrongSqId,
    /// A command ends so and is not carried out.
    Status(Status),
    /// Administrative commands of this opcode end with Internal Error.
    Refuse(u8),
    /// Administrative commands of this opcode are not carried out and not completed.
    Ignore(u8),
    /// CSTS.RDY stays 0.
    NeverReady,
    /// CSTS.RDY stays 1.
    NeverDisabled,
    /// CSTS.CFS.
    Fatal,
    /// CSTS.NSSRO.
    SubsystemReset,
    /// All ones.
    Removal,
}

/// When it goes wrong, of the times that it could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Every so many times.
    Every(u64),
    /// By lot, one in so many.
    OneIn(u64),
    /// Once, this time (from 1).
    At(u64),
}

/// One fault and its occasion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What goes wrong.
    pub fault: Fault,
    /// When.
    pub when: When,
    /// In this I/O queue only.
    pub queue: Option<u16>,
    /// So often at most.
    pub limit: Option<u64>,
}

impl Rule {
    /// The fault, in any queue and without limit.
    #[must_use]
    pub const fn new(fault: Fault, when: When) -> Self {
        Self { fault, when, queue: None, limit: None }
    }
}

/// What is to go wrong. A command meets one fault at most: that of the first rule that applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// For what is drawn by lot.
    pub seed: u64,
    /// The rules.
    pub rules: Vec<Rule>,
}

impl Faults {
    /// These rules.
    #[must_use]
    pub fn new(seed: u64, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self { seed, rules: rules.into_iter().collect() }
    }
}
