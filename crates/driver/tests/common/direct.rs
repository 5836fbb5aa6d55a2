//! Transport to a controller in the same process.

use shadowbell_controller::Controller as Emulated;
use shadowbell_driver::{Transport, TransportError};
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_testing::wait::LIMIT;
use std::sync::{Arc, mpsc};

/// A controller whose methods the transport calls directly.
pub(crate) struct Direct(pub(crate) Emulated);

impl Direct {
    fn failed(operation: &'static str, why: impl ToString) -> TransportError {
        let source = why.to_string().into();
        TransportError::Failed { device: "direct".into(), operation, source }
    }

    fn wait(operation: &'static str, done: &mpsc::Receiver<()>) -> Result<(), TransportError> {
        done.recv_timeout(LIMIT).map_err(|e| Self::failed(operation, e))
    }
}

impl Transport for Direct {
    fn name(&self) -> &str {
        "direct"
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        let mut data = [0; 4];
        self.0.read(offset, &mut data);
        Ok(u32::from_le_bytes(data))
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let mut data = [0; 8];
        self.0.read(offset, &mut data);
        Ok(u64::from_le_bytes(data))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.0.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.0.write(offset, &value.to_le_bytes());
        Ok(())
    }

    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.0.write_doorbell(offset, value);
        Ok(())
    }

    fn doorbell_page(&self) -> Option<SharedBytes> {
        self.0.has_mapped_doorbells().then(|| self.0.doorbells().clone())
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        let iova = mapping.address() as u64;
        self.0
            .map_dma(iova, mapping.len() as u64, &mapping.bytes())
            .map_err(|error| Self::failed("mapping", error))?;
        Ok(iova)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let (done, wait) = mpsc::channel();
        self.0
            .unmap_dma(iova, len, move || done.send(()).unwrap_or_default())
            .map_err(|error| Self::failed("unmapping", error))?;
        Self::wait("unmapping", &wait)
    }

    fn irq_vectors(&self) -> u32 {
        self.0.vectors() as u32
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        let event = event.map(|event| event.try_clone().unwrap());
        assert!(self.0.set_interrupt(vector as usize, event));
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        let (done, wait) = mpsc::channel();
        self.0.reset(move || done.send(()).unwrap_or_default());
        Self::wait("resetting", &wait)
    }
}
