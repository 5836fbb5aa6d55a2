//! In-process controller: target `local:` and plain disk names.

use shadowbell_config::controller_config::{ConfigureError, ControllerConfig, OfferedDoorbells};
use shadowbell_controller::{Carrier, PoolOptions};
use shadowbell_disk::Disk;
use shadowbell_frontend::InProcess;
use std::sync::Arc;

/// Starts a controller over `disk` in this process. With `mapped`, its doorbells are memory that
/// the controller polls.
///
/// # Errors
/// The disk cannot be used for a namespace, or no thread can be started.
pub fn connect(disk: Arc<dyn Disk>, mapped: bool) -> anyhow::Result<Arc<InProcess>> {
    let doorbells = if mapped { OfferedDoorbells::Mapped } else { OfferedDoorbells::Shadow };
    let requested = ControllerConfig { doorbells, ..ControllerConfig::default() };
    let name = format!("local:{}", disk.name());
    let config = requested.configure(&name, vec![disk]).map_err(ConfigureError::into_error)?;
    let carrier = Carrier { mapped_doorbells: mapped, ..Carrier::default() };
    Ok(Arc::new(InProcess::start(config, carrier, &PoolOptions::default(), name)?))
}
