//! A controller in this very process: what `local:` in front of a disk means.

use crate::plan::{ControllerPlan, Doorbells, PlanError};
use ::shadowbell_frontend::StartError;
use shadowbell_backend::Disk;
use shadowbell_controller::{Carrier, Config, PoolOptions};
use shadowbell_driver::Transport;
use std::sync::Arc;

pub use ::shadowbell_frontend::InProcess;

/// The way to a controller in this process over `disk`; with `mapped`, its doorbells are memory.
///
/// # Errors
/// The disk is not possible, or the system has no more threads.
pub fn connect(disk: Arc<dyn Disk>, mapped: bool) -> anyhow::Result<Arc<dyn Transport>> {
    let doorbells = if mapped { Doorbells::Mapped } else { Doorbells::Shadow };
    let plan = ControllerPlan { doorbells, ..ControllerPlan::of(&[]) };
    let name = format!("local:{}", disk.name());
    let config = plan.configure(&name, vec![disk]).map_err(PlanError::into_error)?;
    Ok(Arc::new(start(config, doorbells, &PoolOptions::default(), name)?))
}

/// Makes a controller as `plan` says, served by workers of its own.
///
/// # Errors
/// The plan can not be carried out, or the system has no more threads.
pub fn open(plan: &ControllerPlan, pool: &PoolOptions) -> anyhow::Result<InProcess> {
    let disks: Vec<_> = plan.disks.iter().map(|plan| plan.disk.as_str()).collect();
    let name = format!("local:{}", disks.join(","));
    let config = plan.open(&name).map_err(PlanError::into_error)?;
    Ok(start(config, plan.doorbells, pool, name)?)
}

fn start(
    config: Config,
    doorbells: Doorbells,
    pool: &PoolOptions,
    name: String,
) -> Result<InProcess, StartError> {
    let mapped_doorbells = doorbells == Doorbells::Mapped;
    let carrier = Carrier { mapped_doorbells, ..Carrier::default() };
    InProcess::start(config, carrier, pool, name)
}
