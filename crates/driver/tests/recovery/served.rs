//! The real controller behind a real vfio-user socket.

use ::shadowbell_vfio_user::device::{
    Deferral, DeviceInfo, DmaMap, DmaUnmap, IrqData, IrqInfo, RegionInfo, SetIrqs, irq, region,
};
use ::shadowbell_vfio_user::server::{Handle, Limits};
use ::shadowbell_vfio_user::{Completer, Device, Errno, Listener, Reactor};
use shadowbell_controller::{BAR0_BYTES, Controller as Emulated};
use shadowbell_driver::VfioUser;
use shadowbell_memory::{EventFd, Mapping, Protection};
use shadowbell_testing::wait::LIMIT;
use std::thread::JoinHandle;

/// The parts of a PCI function that the driver needs.
struct Function {
    controller: Emulated,
    config: [u8; 256],
}

impl Device for Function {
    fn info(&mut self) -> DeviceInfo {
        DeviceInfo { resettable: true, ..DeviceInfo::default() }
    }

    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno> {
        let size = match index {
            region::BAR0 => BAR0_BYTES,
            region::CONFIG => 256,
            _ => 0,
        };
        Ok(RegionInfo { size, readable: true, writable: true, mapping: None })
    }

    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno> {
        let count = if index == irq::MSIX { self.controller.vectors() as u32 } else { 0 };
        Ok(IrqInfo { count, eventfd: true, ..IrqInfo::default() })
    }

    fn disconnected(&mut self, done: Completer) {
        self.controller.disconnect(move || done.ok());
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        if index == region::CONFIG {
            let from = self.config.get(offset as usize..).ok_or(Errno::INVAL)?;
            data.copy_from_slice(from.get(..data.len()).ok_or(Errno::INVAL)?);
        } else {
            self.controller.read(offset, data);
        }
        Ok(())
    }

    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
        _: &mut Deferral<'_>,
    ) -> Result<(), Errno> {
        if index == region::CONFIG {
            let into = self.config.get_mut(offset as usize..).ok_or(Errno::INVAL)?;
            into.get_mut(..data.len()).ok_or(Errno::INVAL)?.copy_from_slice(data);
        } else {
            self.controller.write(offset, data);
        }
        Ok(())
    }

    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno> {
        let IrqData::Eventfds(fds) = request.data else { return Err(Errno::INVAL) };
        if fds.is_empty() {
            for vector in request.start..request.start + request.count {
                self.controller.set_interrupt(vector as usize, None);
            }
        }
        for (vector, fd) in (request.start..).zip(fds) {
            let event = EventFd::of_peer(std::sync::Arc::new(fd), &Default::default())
                .map_err(|_| Errno::BADF)?;
            self.controller.set_interrupt(vector as usize, Some(event));
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let fd = map.fd.ok_or(Errno::OPNOTSUPP)?;
        let mapping = Mapping::from_fd(&fd, map.fd_offset, map.len, Protection::ReadWrite);
        let bytes = mapping.map_err(|_| Errno::INVAL)?.bytes();
        self.controller.map_dma(map.iova, map.len, &bytes).map_err(|_| Errno::INVAL)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Completer) {
        let DmaUnmap::Range { iova, len } = unmap else { panic!("not all at once") };
        self.controller.unmap_dma(iova, len, move || done.ok()).unwrap();
    }

    fn reset(&mut self, done: Completer) {
        self.config[4..6].fill(0);
        self.controller.reset(move || done.ok());
    }
}

/// A vfio-user server with its own thread.
pub(crate) struct Server {
    directory: tempfile::TempDir,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(controller: &Emulated) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut reactor = Reactor::new(Limits::default()).unwrap();
        let listener = Listener::bind(directory.path().join("cntrl")).unwrap();
        // The configuration space has no capabilities, because this server needs none for eventfd
        // interrupts.
        let function = Function { controller: controller.clone(), config: [0; 256] };
        reactor.add(listener, Box::new(function)).unwrap();
        let handle = reactor.handle();
        let thread = std::thread::spawn(move || reactor.run().map(|_| ()).unwrap());
        Self { directory, handle, thread: Some(thread) }
    }

    pub(crate) fn connect(&self) -> VfioUser {
        VfioUser::connect(self.directory.path(), LIMIT).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
