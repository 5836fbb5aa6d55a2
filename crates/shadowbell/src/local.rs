//! A controller in this very process: what `local:` in front of a disk means.

use crate::controller_config::{ConfigureError, ControllerConfig, OfferedDoorbells};
use shadowbell_backend::Disk;
use shadowbell_controller::{Carrier, PoolOptions};
use shadowbell_frontend::InProcess;
use std::sync::Arc;

/// The way to a controller in this process over `disk`; with `mapped`, its doorbells are memory.
///
/// # Errors
/// The disk is not possible, or the system has no more threads.
pub fn connect(disk: Arc<dyn Disk>, mapped: bool) -> anyhow::Result<Arc<InProcess>> {
    let doorbells = if mapped { OfferedDoorbells::Mapped } else { OfferedDoorbells::Shadow };
    let asked = ControllerConfig { doorbells, ..ControllerConfig::default() };
    let name = format!("local:{}", disk.name());
    let config = asked.configure(&name, vec![disk]).map_err(ConfigureError::into_error)?;
    let carrier = Carrier { mapped_doorbells: mapped, ..Carrier::default() };
    Ok(Arc::new(InProcess::start(config, carrier, &PoolOptions::default(), name)?))
}
