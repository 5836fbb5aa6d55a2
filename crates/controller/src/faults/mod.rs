//! Faults on purpose: a controller that does what no controller should, so that hosts can be
//! tested.
//!
//! Only with the cargo feature `faults`. A controller does nothing wrong before it is asked to,
//! with [`Controller::inject`](crate::Controller::inject); from then on its queues are served by a
//! path of their own, command by command.
//!
//! # As text
//!
//! Rules are separated by commas: `FAULT[=ARGUMENT]` and then, in any order, `:every=N`,
//! `:rate=1/N` or `:at=N` (the Nth time only; [`When::Every`] 1 if nothing is said), `:queue=QID`
//! and `:limit=N`. `seed=N` seeds what is drawn by lot.
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

mod control;
mod injector;
mod model;
mod parse;
mod queues;

pub use injector::Injected;
pub use model::{Fault, Faults, Rule, When};
pub use parse::BadFaults;

use crate::control::Deferred;
use crate::controller::Controller;
use control::FaultyControl;
use injector::Injector;
use std::sync::Arc;

impl Controller {
    /// From now on, things go wrong, as `faults` says and no more as an earlier call said. With
    /// [`Faults::default`] nothing goes wrong any more, except what goes wrong already.
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
