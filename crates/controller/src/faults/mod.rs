//! Fault injection: a controller that misbehaves on request, for tests of hosts.
//!
//! Available with the cargo feature `faults`. After the first call of
//! [`Controller::inject`](crate::Controller::inject), a separate implementation serves the queues,
//! one command at a time, and injects faults.
//!
//! # Text format
//!
//! Rules are separated by commas. A rule is `FAULT[=ARGUMENT]`, followed in any order by
//! `:queue=QID`, `:limit=N` and one of `:every=N` (the default is `every=1`), `:rate=1/N` and
//! `:at=N` (only the Nth time). `seed=N` is the seed of the random choices of `rate`.
//!
//! | fault | effect |
//! |---|---|
//! | `drop-before` | a command is neither executed nor completed |
//! | `drop-after` | a command is executed, but not completed |
//! | `hang` | a command is neither executed nor completed, until aborted or its queue deleted |
//! | `hang=TIME` | as `hang`, but after that time the command ends with Internal Error |
//! | `stall=TIME` | a command is executed after that time, unless aborted or its queue deleted |
//! | `delay=TIME` | a completion is delayed by that time: `delay=2ms`, `delay=500us` |
//! | `duplicate` | a command is completed twice |
//! | `corrupt` | bits of a completion are flipped: result, status, SQ head or SQ identifier |
//! | `wrong-cid` | a completion has a command identifier that no command has |
//! | `wrong-phase` | a completion has the wrong phase tag, which hides it and all later ones |
//! | `wrong-head` | a completion has an impossible submission queue head |
//! | `wrong-sq-id` | a completion has the identifier of another submission queue |
//! | `status=STATUS` | a command is not executed, and ends with this status (SCT and SC, `0x006`) |
//! | `refuse=OPCODE` | an admin command ends with Internal Error |
//! | `ignore=OPCODE` | an admin command is neither executed nor completed |
//! | `never-ready` | CSTS.RDY stays 0 when the controller is enabled |
//! | `never-disabled` | CSTS.RDY stays 1 when the controller is disabled |
//! | `fatal` | CSTS.CFS is set, and no command is fetched any more |
//! | `subsystem-reset` | the controller is reset, and CSTS.NSSRO is set |
//! | `removal` | all registers read as all ones from then on |
//!
//! `fatal`, `subsystem-reset` and `removal` happen, and are counted, when a command is fetched from
//! an I/O queue.
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
mod overrides;
mod rules;

pub use injector::Injected;
pub use rules::{BadFaults, Fault, Faults, Rule, When};

use crate::control::Deferred;
use crate::controller::Controller;
use injector::Injector;
use overrides::FaultyControl;
use std::sync::Arc;

impl Controller {
    /// Injects `faults` from now on, instead of the faults of an earlier call. [`Faults::default`]
    /// ends the injection. Faults that have already happened keep their effect.
    pub fn inject(&self, faults: Faults) -> Injected {
        let injector = Arc::new(Injector::new(faults));
        self.inner().with(|control, cx| {
            match control.overriding::<FaultyControl>() {
                Some(faulty) => faulty.arm(Arc::clone(&injector)),
                None => control.set_override(cx, Box::new(FaultyControl::new(&injector))),
            }
            Deferred::default()
        });
        Injected::new(injector)
    }
}
