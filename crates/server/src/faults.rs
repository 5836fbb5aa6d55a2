//! Fault injection: `--faults`, in a build with the cargo feature `faults`.

use super::server::Server;
use shadowbell_controller::faults::{Faults, Injected};
use tracing::{info, warn};

/// Options for fault injection.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct FaultArgs {
    /// Inject faults, to test hosts: `drop-after:every=100,delay=2ms:rate=1/50,seed=7`
    #[doc = ""]
    #[doc = "Rules are separated by commas. Each is a fault, and then `:every=N`, `:rate=1/N` or `:at=N` \
             (all, if none is given), `:queue=QID` and `:limit=N`. Faults of I/O commands: drop-before, \
             drop-after, hang (until it is aborted), hang=TIME (or for that time, after which it ends \
             with Internal Error), stall=TIME, delay=TIME, duplicate, corrupt, wrong-cid, wrong-phase, \
             wrong-head, wrong-sq-id, status=STATUS, fatal, subsystem-reset, removal. Of administrative \
             commands: refuse=OPCODE, ignore=OPCODE. Of the controller: never-ready, never-disabled. \
             A TIME is 500us, 20ms or 5s. How long the host waits for a command that never ends is \
             its own choice: `--timeout` of `bench` and `verify`, 30 s in the Linux driver."]
    #[arg(long = "faults", value_name = "SPEC")]
    faults: Option<Faults>,

    /// Attempt something that the sandbox forbids: a system call by its name, without arguments,
    /// or open:PATH or write:PATH
    #[arg(long, value_name = "WHAT")]
    attempt: Vec<String>,
}

/// Counters of injected faults, by controller.
pub(super) struct InjectedFaults(Vec<(String, Injected)>);

impl FaultArgs {
    /// Attempts the operations of `--attempt`, and logs their results.
    pub(super) fn attempt(&self) {
        for what in &self.attempt {
            let outcome = match what.split_once(':') {
                Some(("open", path)) => std::fs::File::open(path).map(drop),
                Some(("write", path)) => std::fs::File::create(path).map(drop),
                _ => {
                    let named = |call: &syscalls::Sysno| call.name() == what;
                    let call = syscalls::Sysno::iter().find(named);
                    let number = call.map_or(-1, |call| call.id().into());
                    shadowbell_memory::sigsys::attempt(number, [0; 4]).map(drop)
                }
            };
            match outcome {
                Ok(()) => warn!("attempt {what}: nothing was in the way"),
                Err(error) => warn!("attempt {what}: {error}"),
            }
        }
    }

    /// Starts fault injection for all controllers.
    pub(super) fn begin(&self, server: &Server) -> InjectedFaults {
        let Some(faults) = &self.faults else { return InjectedFaults(Vec::new()) };
        warn!("fault injection is on: do not rely on the disks of this server");
        let served = server.controllers();
        let served = served.iter();
        InjectedFaults(
            served.map(|s| (s.name.clone(), s.controller.inject(faults.clone()))).collect(),
        )
    }
}

impl InjectedFaults {
    /// Logs the numbers of injected faults.
    pub(super) fn report(&self) {
        for (name, injected) in &self.0 {
            info!("{name}: {} faults injected", injected.total());
            for (rule, count) in injected.by_rule() {
                info!("{name}: {count} times {:?}", rule.fault);
            }
        }
    }
}
