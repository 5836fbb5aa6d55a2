//! A server that does wrong on purpose: `--faults`, in a build with the cargo feature `faults`.

use super::service::Service;
use controller::faults::{Faults, Injected};
use tracing::{info, warn};

/// What is to go wrong.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FaultArgs {
    /// Do wrong on purpose, to test hosts: `drop-after:every=100,delay=2ms:rate=1/50,seed=7`; the
    /// documentation of the controller crate's module `faults` has them all
    #[arg(long = "faults", value_name = "SPEC")]
    faults: Option<Faults>,
}

/// What went wrong so far, by controller.
pub(super) struct Wrongs(Vec<(String, Injected)>);

impl FaultArgs {
    /// Things go wrong from here on, in every controller.
    pub(super) fn begin(&self, service: &Service) -> Wrongs {
        let Some(faults) = &self.faults else { return Wrongs(Vec::new()) };
        warn!("faults are injected: no disk that is served here is to be relied on");
        let served = service.controllers().iter();
        Wrongs(served.map(|s| (s.name.clone(), s.controller.inject(faults.clone()))).collect())
    }
}

impl Wrongs {
    /// Tells of them.
    pub(super) fn report(&self) {
        for (name, injected) in &self.0 {
            info!("{name}: {} faults injected", injected.total());
            for (rule, count) in injected.by_rule() {
                info!("{name}: {count} times {:?}", rule.fault);
            }
        }
    }
}
