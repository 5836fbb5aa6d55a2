//! In-process transport: connects the driver to a controller in the same process.
//!
//! Register accesses are function calls, and the controller accesses the driver's memory directly,
//! so a test or a benchmark measures only the driver and the controller.
//!
//! ```
//! use shadowbell_driver::{AttachOptions, Controller};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ssd = shadowbell_frontend::InProcess::over(shadowbell_disk_file::open("mem:1MiB")?)?;
//! let controller = Controller::attach(Arc::new(ssd), &AttachOptions::default())?;
//! assert_eq!(controller.namespace(1).map(|namespace| namespace.bytes()), Some(1 << 20));
//! # Ok(())
//! # }
//! ```

use shadowbell_controller::config::{Config, NamespaceConfig, uuid_from};
use shadowbell_controller::{Carrier, Controller, NewError, Pool, PoolOptions};
use shadowbell_disk::Disk;
use shadowbell_driver::{Transport, TransportError};
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// Maximum time to wait until the controller no longer accesses memory. The time is long, because
/// the controller's I/O threads first wait for requests to their disks.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// Error in starting a controller in this process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The I/O threads could not be started: no thread or descriptor is available.
    #[error("the I/O threads could not be started: {0}")]
    Workers(io::Error),
    /// The configuration of the controller is invalid.
    #[error(transparent)]
    Controller(#[from] NewError),
}

/// A [`Transport`] to a controller in this process. When it is dropped, the controller is reset and
/// no longer accesses shared memory.
#[derive(Debug)]
pub struct InProcess {
    controller: Controller,
    name: String,
}

impl InProcess {
    /// Creates a complete SSD for a test, an example or an experiment: a controller with `disk` as
    /// namespace 1, shadow doorbells and one I/O thread.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn over(disk: Arc<dyn Disk>) -> Result<Self, StartError> {
        let name = format!("local:{}", disk.name());
        let namespaces = vec![NamespaceConfig { uuid: uuid_from(&name), disk }];
        let config = Config { namespaces, ..Config::default() };
        let pool = PoolOptions { workers: 1, ..PoolOptions::default() };
        Self::start(config, Carrier::default(), &pool, name)
    }

    /// Creates a controller with its own I/O threads. `name` is the name in messages for users.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        config: Config,
        carrier: Carrier,
        pool: &PoolOptions,
        name: String,
    ) -> Result<Self, StartError> {
        let pool = Pool::start(pool).map_err(StartError::Workers)?;
        Ok(Self::new(Controller::new(config, pool, carrier)?, name))
    }

    /// Wraps `controller`. No other transport or front end may be connected to the controller.
    #[must_use]
    pub fn new(controller: Controller, name: String) -> Self {
        Self { controller, name }
    }

    /// The wrapped controller, for its counters.
    #[must_use]
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    fn failed(
        &self,
        operation: &'static str,
        source: impl Into<shadowbell_driver::BoxError>,
    ) -> TransportError {
        TransportError::Failed { device: self.name.clone(), operation, source: source.into() }
    }

    /// Calls `start`, and waits until its completion callback is called.
    fn wait(
        &self,
        operation: &'static str,
        start: impl FnOnce(Box<dyn FnOnce() + Send>) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let (sender, receiver) = sync_channel(1);
        start(Box::new(move || {
            let _ = sender.send(());
        }))?;
        receiver.recv_timeout(RELEASE_TIMEOUT).map_err(|_| TransportError::Disconnected {
            device: self.name.clone(),
            operation,
            source: "the commands in flight do not end".into(),
        })
    }
}

impl Transport for InProcess {
    fn name(&self) -> &str {
        &self.name
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let mut bytes = [0; 4];
        self.controller.read(offset, &mut bytes);
        Ok(u32::from_le_bytes(bytes))
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let mut bytes = [0; 8];
        self.controller.read(offset, &mut bytes);
        Ok(u64::from_le_bytes(bytes))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.controller.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.controller.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.controller.write_doorbell(offset, value);
        Ok(())
    }

    fn doorbell_page(&self) -> Option<SharedBytes> {
        self.controller.has_mapped_doorbells().then(|| self.controller.doorbells().clone())
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        // The address of a mapping is unique in this process, so it serves as IOVA.
        let iova = mapping.address() as u64;
        let mapped = self.controller.map_dma(iova, mapping.len() as u64, &mapping.bytes());
        mapped.map(|()| iova).map_err(|error| self.failed("sharing memory", error))
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        const ACTION: &str = "unmapping memory";
        self.wait(ACTION, |done| {
            let unmapped = self.controller.unmap_dma(iova, len, done);
            unmapped.map_err(|error| self.failed(ACTION, error))
        })
    }

    fn irq_vectors(&self) -> u32 {
        u32::try_from(self.controller.vectors()).unwrap_or(u32::MAX)
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        const ACTION: &str = "setting up an interrupt";
        let event = event.map(EventFd::try_clone).transpose();
        let event = event.map_err(|error| self.failed(ACTION, error))?;
        if self.controller.set_interrupt(vector as usize, event) {
            Ok(())
        } else {
            let why = io::Error::new(io::ErrorKind::InvalidInput, "there is no such vector");
            Err(self.failed(ACTION, why))
        }
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.wait("resetting the controller", |done| {
            self.controller.reset(done);
            Ok(())
        })
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let _ = self.wait("disconnecting", |done| {
            self.controller.disconnect(done);
            Ok(())
        });
    }
}
