//! Fault types and fault rules.

use shadowbell_spec::status::Status;
use std::time::Duration;

/// Type of a fault. The [module](super) documents the effect of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Command lost before its execution.
    DropBefore,
    /// Completion lost after the execution.
    DropAfter,
    /// Command that hangs until it is aborted, or until this time, when it ends with an error.
    Hang(Option<Duration>),
    /// Execution delayed by this time; the data are those in memory at that moment.
    Stall(Duration),
    /// Completion delayed by this time.
    Delay(Duration),
    /// Completion posted twice.
    Duplicate,
    /// Completion with flipped bits, except in the command identifier.
    Corrupt,
    /// Completion with a command identifier that no command has.
    WrongCid,
    /// Completion with the wrong phase tag, so the host does not see it.
    WrongPhase,
    /// Completion with a submission queue head outside of the queue.
    WrongHead,
    /// Completion with the identifier of another submission queue.
    WrongSqId,
    /// Command that ends with this status and is not executed.
    Status(Status),
    /// Admin commands of this opcode end with Internal Error.
    Refuse(u8),
    /// Admin commands of this opcode are neither executed nor completed.
    Ignore(u8),
    /// CSTS.RDY stays 0 when the controller is enabled.
    NeverReady,
    /// CSTS.RDY stays 1 when the controller is disabled.
    NeverDisabled,
    /// Controller Fatal Status: CSTS.CFS is set.
    Fatal,
    /// NVM Subsystem Reset Occurred: the controller is reset and CSTS.NSSRO is set.
    SubsystemReset,
    /// Surprise removal: all registers read as all ones.
    Removal,
}

/// Frequency of a fault, among its possible occasions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Every nth occasion.
    Every(u64),
    /// Random occasions, one in n on average.
    OneIn(u64),
    /// The nth occasion only, counted from 1.
    At(u64),
}

/// Fault with its frequency and restrictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Type of the fault.
    pub fault: Fault,
    /// Frequency of the fault.
    pub when: When,
    /// I/O queue to which the fault is restricted.
    pub queue: Option<u16>,
    /// Maximum number of injections.
    pub limit: Option<u64>,
}

impl Rule {
    /// Creates a rule for all queues and without a limit.
    #[must_use]
    pub const fn new(fault: Fault, when: When) -> Self {
        Self { fault, when, queue: None, limit: None }
    }
}

/// Fault rules. A command gets at most one fault: that of the first rule that applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of the random choices.
    pub seed: u64,
    /// The rules.
    pub rules: Vec<Rule>,
}

impl Faults {
    /// Creates fault rules with this seed.
    #[must_use]
    pub fn new(seed: u64, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self { seed, rules: rules.into_iter().collect() }
    }
}
