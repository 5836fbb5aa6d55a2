//! VFIO migration: state stream of a PCI function and its controller.
//!
//! The stream is a state message of [`shadowbell_state`], as between two server processes, but
//! without descriptors: the client itself connects its memory and eventfds to the new server.
//! Streams are untrusted, so every part is checked before use.

use super::ControllerDevice;
use super::halt::Halt;
use super::migrated_state::{CONTROLLER, FUNCTION, MigratedFunction, Parsed};
use shadowbell_controller::Announcement;
use shadowbell_state::{Bytes, Parcel};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::device::Completer;
use shadowbell_vfio_user::migration::{LoggingRange, LoggingReport, Migration};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

impl ControllerDevice {
    fn stream(&self) -> Result<Vec<u8>, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let controller = self.controller.save_for_migration().map_err(|e| text(&e))?;
        let (table, pending) = self.msix.bytes();
        let function = MigratedFunction {
            config: Bytes(self.config.bytes().to_vec()),
            msix_table: Bytes(table.to_vec()),
            msix_pending: Bytes(pending.to_vec()),
        };
        let mut parcel = Parcel::new();
        parcel.add(FUNCTION, true, &function).map_err(|e| text(&e))?;
        parcel.add(CONTROLLER, true, &controller).map_err(|e| text(&e))?;
        parcel.encode(0).map_err(|e| text(&e))
    }

    /// Restores a parsed state in the function and the controller. Returns the interrupts that are
    /// to be raised when the device runs.
    fn use_parsed(&mut self, parsed: Parsed) -> Result<Announcement, String> {
        let Parsed { function, controller } = parsed;
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let config = function.config.0.as_slice().try_into();
        let config = config.map_err(|_| "it has another configuration space".to_owned())?;
        if !self.msix.restore(&function.msix_table.0, &function.msix_pending.0) {
            return Err("it has another number of interrupt vectors".to_owned());
        }
        self.config.restore(config);
        match (self.config.command().bus_master, self.memory.is_granted()) {
            (true, _) => self.memory.grant(),
            (false, true) => self.memory.revoke(Completer::new(|_| ())),
            (false, false) => {}
        }
        self.has_checked = false;
        self.controller.load_migrated(controller).map_err(|e| text(&e))
    }
}

impl Migration for ControllerDevice {
    fn stop(&mut self, done: Completer) {
        self.halt = Halt::Stopped;
        self.controller.freeze(move || done.ok());
    }

    fn run(&mut self) -> Result<(), Errno> {
        self.memory.publish();
        match std::mem::take(&mut self.halt) {
            Halt::Loaded(announcement) => self.controller.run_migrated(announcement),
            Halt::Stopped | Halt::Parsing(_) | Halt::Running => self.controller.resume(),
        }
        Ok(())
    }

    fn save_state(&mut self) -> Result<Vec<u8>, Errno> {
        self.stream().map_err(|why| {
            self.log.warn(format_args!("the controller cannot be migrated: {why}"));
            Errno::OPNOTSUPP
        })
    }

    fn discard_state(&mut self, done: Completer) {
        self.halt = Halt::Stopped;
        self.controller.reset(move || done.ok());
    }

    fn load_state(&mut self, stream: Vec<u8>, done: Completer) {
        // A client that disconnects does not end the parser. Without this check, the next client
        // could start a second parser.
        if self.parser.strong_count() != 0 {
            let what = "a migration state is refused: the one before is still being parsed";
            self.log.warn(format_args!("{what}"));
            return done.complete(Err(Errno::BUSY));
        }
        let (sender, parsed) = sync_channel(1);
        self.halt = Halt::Parsing(parsed);
        let parses = Arc::new(());
        self.parser = Arc::downgrade(&parses);
        let parse = move || {
            // `use_state` receives the result. If the device was reset meanwhile, the send fails.
            let _ = sender.send(Parsed::of(&stream));
            drop((stream, parses));
            done.ok();
        };
        // If no thread can be started, the drop of `done` fails the request.
        let thread = std::thread::Builder::new().name("sb-migration".into()).spawn(parse);
        if let Err(error) = thread {
            self.log.warn(format_args!("no thread parses a migration state: {error}"));
        }
    }

    fn use_state(&mut self) -> Result<(), Errno> {
        self.memory.publish();
        let Halt::Parsing(parsed) = std::mem::replace(&mut self.halt, Halt::Stopped) else {
            return Err(Errno::INVAL);
        };
        let parsed = parsed.try_recv().unwrap_or_else(|_| Err("it was not parsed".into()));
        match parsed.and_then(|parsed| self.use_parsed(parsed)) {
            Ok(announcement) => {
                self.halt = Halt::Loaded(announcement);
                Ok(())
            }
            Err(why) => {
                self.log.warn(format_args!(
                    "a client has sent a migration state that this server cannot load: {why}; the source \
                     must be a server with the same disks, serial number, queues and release, or the \
                     release before"
                ));
                Err(Errno::INVAL)
            }
        }
    }

    fn start_logging(&mut self, _ranges: &[LoggingRange]) -> Result<(), Errno> {
        if self.controller.log_writes(true, || ()) { Ok(()) } else { Err(Errno::BUSY) }
    }

    fn stop_logging(&mut self) -> Result<(), Errno> {
        if self.controller.log_writes(false, || ()) { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn sync_log(&mut self, done: Completer) {
        if self.controller.dirty_log().is_none() {
            return done.complete(Err(Errno::INVAL));
        }
        self.controller.renew_views(move || done.ok());
    }

    fn take_log(&mut self, report: &LoggingReport, bitmap: &mut [u64]) -> Result<(), Errno> {
        let log = self.controller.dirty_log().ok_or(Errno::INVAL)?;
        log.take(report.iova, report.length, report.page_size, bitmap);
        Ok(())
    }
}
