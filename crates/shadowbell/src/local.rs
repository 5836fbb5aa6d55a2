//! A controller in this very process: what `local:` in front of a disk means.
//!
//! The driver's commands reach it by function calls and its memory is the driver's own, so what is
//! measured or tested there is the two ends and nothing between.

use crate::plan::{ControllerPlan, Doorbells, PlanError};
use anyhow::Context;
use controller::{Carrier, Config, Controller, Pool, PoolOptions};
use disk::Disk;
use driver::{Transport, TransportError};
use memory::{EventFd, Mapping, SharedBytes};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// How long to wait for the controller to let go of memory. Its workers wait for disks to do so.
const PATIENCE: Duration = Duration::from_secs(60);

/// The way to a controller in this process over `disk`; with `mapped`, its doorbells are memory.
///
/// # Errors
/// The disk is not possible, or the system has no more threads.
pub fn connect(disk: Arc<dyn Disk>, mapped: bool) -> anyhow::Result<Arc<dyn Transport>> {
    let doorbells = if mapped { Doorbells::Mapped } else { Doorbells::Shadow };
    let plan = ControllerPlan { doorbells, ..ControllerPlan::of(&[]) };
    let name = format!("local:{}", disk.name());
    let config = plan.configure(&name, vec![disk]).map_err(PlanError::into_error)?;
    Ok(Arc::new(Local::start(config, doorbells, &PoolOptions::default(), name)?))
}

/// A [`Transport`] to a controller in this process. Dropping it resets the controller and takes all
/// memory away from it.
#[derive(Debug)]
pub struct Local {
    controller: Controller,
    name: String,
}

impl Local {
    /// Makes a controller as `plan` says, served by workers of its own.
    ///
    /// # Errors
    /// The plan can not be carried out, or the system has no more threads.
    pub fn open(plan: &ControllerPlan, pool: &PoolOptions) -> anyhow::Result<Self> {
        let disks: Vec<_> = plan.disks.iter().map(|plan| plan.disk.as_str()).collect();
        let name = format!("local:{}", disks.join(","));
        let config = plan.open(&name).map_err(PlanError::into_error)?;
        Self::start(config, plan.doorbells, pool, name)
    }

    fn start(
        config: Config,
        doorbells: Doorbells,
        pool: &PoolOptions,
        name: String,
    ) -> anyhow::Result<Self> {
        let pool = Pool::start(pool).context("the workers can not be started")?;
        let mapped_doorbells = doorbells == Doorbells::Mapped;
        let carrier = Carrier { mapped_doorbells, ..Carrier::default() };
        Ok(Self::new(Controller::new(config, pool, carrier)?, name))
    }

    /// The way to `controller`, which nobody else may have.
    #[must_use]
    pub fn new(controller: Controller, name: String) -> Self {
        Self { controller, name }
    }

    /// The controller at the other end, for its counters.
    #[must_use]
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    fn failed(&self, doing: &'static str, source: impl Into<driver::BoxError>) -> TransportError {
        TransportError::Failed { device: self.name.clone(), doing, source: source.into() }
    }

    /// Waits for what `start` starts.
    fn wait(
        &self,
        doing: &'static str,
        start: impl FnOnce(Box<dyn FnOnce() + Send>) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let (sender, receiver) = sync_channel(1);
        start(Box::new(move || {
            let _ = sender.send(());
        }))?;
        receiver.recv_timeout(PATIENCE).map_err(|_| TransportError::Gone {
            device: self.name.clone(),
            doing,
            source: "what is in flight does not end".into(),
        })
    }
}

impl Transport for Local {
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
        // No two mappings of a process have an address in common.
        let iova = mapping.address() as u64;
        let mapped = self.controller.map_dma(iova, mapping.len() as u64, &mapping.bytes());
        mapped.map(|()| iova).map_err(|error| self.failed("sharing memory", error))
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        const DOING: &str = "taking memory back";
        self.wait(DOING, |done| {
            let unmapped = self.controller.unmap_dma(iova, len, done);
            unmapped.map_err(|error| self.failed(DOING, error))
        })
    }

    fn irq_vectors(&self) -> u32 {
        u32::try_from(self.controller.vectors()).unwrap_or(u32::MAX)
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        const DOING: &str = "setting up an interrupt";
        let event = event.map(EventFd::try_clone).transpose();
        let event = event.map_err(|error| self.failed(DOING, error))?;
        if self.controller.set_interrupt(vector as usize, event) {
            Ok(())
        } else {
            let why = io::Error::new(io::ErrorKind::InvalidInput, "there is no such vector");
            Err(self.failed(DOING, why))
        }
    }

    fn reset(&self) -> Result<(), TransportError> {
        self.wait("resetting the controller", |done| {
            self.controller.reset(done);
            Ok(())
        })
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let _ = self.wait("letting go", |done| {
            self.controller.disconnect(done);
            Ok(())
        });
    }
}
