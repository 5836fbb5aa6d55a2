//! Faults on purpose: a controller that does what no controller should, so that hosts can be tested.
//!
//! Only with the cargo feature `faults`. A controller does nothing wrong before it is told to, with
//! [`Controller::inject`](crate::Controller::inject); from then on its queues are served by a path
//! of their own, command by command.
//!
//! # As text
//!
//! Rules are separated by commas: `FAULT[=ARGUMENT]` and then, in any order, `:every=N`, `:rate=1/N`
//! or `:at=N` (the Nth time only; [`When::Every`] 1 if nothing is said), `:queue=QID` and `:limit=N`.
//! `seed=N` seeds what is drawn by lot.
//!
//! | fault | what happens |
//! |---|---|
//! | `drop-before` | a command is not carried out, and not completed |
//! | `drop-after` | it is carried out, and not completed |
//! | `hang` | neither, until it is aborted or its queue deleted |
//! | `hang=TIME` | the same, but after that time it ends with Internal Error |
//! | `stall=TIME` | it is carried out that much later, unless it is aborted or its queue deleted |
//! | `delay=TIME` | it is completed that much later: `delay=2ms`, `delay=500us` |
//! | `duplicate` | it is completed twice |
//! | `corrupt` | some bits of its completion are flipped: results, status, queue head and identifier |
//! | `wrong-cid` | its completion has an identifier that no command has |
//! | `wrong-phase` | its completion has the wrong phase tag, and nothing behind it is found |
//! | `wrong-head` | its completion has a submission queue head that can not be |
//! | `wrong-sq-id` | its completion has another submission queue's identifier |
//! | `status=STATUS` | it is not carried out, and ends with this status (SCT and SC, `0x006`) |
//! | `refuse=OPCODE` | an administrative command ends with Internal Error |
//! | `ignore=OPCODE` | an administrative command does nothing and is not completed |
//! | `never-ready` | CSTS.RDY stays 0 when the controller is enabled |
//! | `never-disabled` | CSTS.RDY stays 1 when the controller is disabled |
//! | `fatal` | CSTS.CFS comes up, and no command is fetched any more |
//! | `subsystem-reset` | the controller is reset, and CSTS.NSSRO comes up |
//! | `removal` | every register reads as all ones, for ever |
//!
//! The last three happen when a command is fetched from an I/O queue, and are counted in these.
//!
//! ```
//! use shadowbell_controller::faults::{Fault, Faults, When};
//!
//! let faults: Faults = "drop-after:every=100,delay=2ms:rate=1/50:queue=1,seed=7".parse()?;
//! assert_eq!(faults.rules[0].fault, Fault::DropAfter);
//! assert_eq!(faults.rules[1].when, When::OneIn(50));
//! # Ok::<(), shadowbell_controller::faults::BadFaults>(())
//! ```

mod injector;
mod parse;
mod registers;

pub(crate) use self::injector::{Armed, Injector};
pub use self::parse::BadFaults;
pub(crate) use self::registers::Overlay;

use crate::admin::Outcome;
use crate::controller::{Controller, Inner};
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong. See the [module](self) for what each of these does.
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

/// What went wrong so far: a handle on the counters of [`Controller::inject`].
#[derive(Clone, Debug)]
pub struct Injected(Arc<Injector>);

impl Injected {
    /// How often each rule applied.
    #[must_use]
    pub fn by_rule(&self) -> Vec<(Rule, u64)> {
        self.0.counts()
    }

    /// How often a fault happened.
    #[must_use]
    pub fn of(&self, fault: Fault) -> u64 {
        self.0.counts().iter().filter(|(rule, _)| rule.fault == fault).map(|(_, n)| n).sum()
    }

    /// All faults.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.counts().iter().map(|(_, n)| n).sum()
    }
}

impl Controller {
    /// From now on, things go wrong, as `faults` says and no more as an earlier call said. With
    /// [`Faults::default`] nothing goes wrong any more, except what goes wrong already.
    pub fn inject(&self, faults: Faults) -> Injected {
        let injector = Arc::new(Injector::new(faults));
        self.inner().shared.faults.arm(Arc::clone(&injector));
        Injected(injector)
    }
}

/// What becomes of an administrative command, if it is not what should.
pub(crate) fn of_admin(inner: &Inner, sqe: &Sqe) -> Option<Result<Outcome, Status>> {
    let injector = inner.shared.faults.armed()?;
    match injector.admin(sqe.opcode)? {
        Fault::Refuse(_) => Some(Err(Status::INTERNAL)),
        _ => Some(Ok(Outcome::Later)),
    }
}
