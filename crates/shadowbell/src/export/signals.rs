//! What ends an export.

use crate::exit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::{Handle, Signals};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::debug;

/// The end of an export, which a signal brings.
pub(super) struct Ending {
    signals: Signals,
    ending: Arc<AtomicBool>,
}

impl Ending {
    /// From now on, the signals that end a program end the wait for them; a second one ends the
    /// program at once.
    pub(super) fn on_signals() -> anyhow::Result<Self> {
        let ends: Vec<_> = [SIGINT, SIGTERM, SIGHUP]
            .into_iter()
            .filter(|s| !crate::nohup::is_ignored(*s))
            .collect();
        let signals = Signals::new(&ends)?;
        let ending = Arc::new(AtomicBool::new(false));
        for signal in ends {
            let status = i32::from(exit::FAILED);
            signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&ending))?;
        }
        // A limit on the size of files is a full disk to whoever writes, no reason to end.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Self { signals, ending })
    }

    /// Ends the wait, too.
    pub(super) fn handle(&self) -> Handle {
        self.signals.handle()
    }

    /// Waits for the end.
    pub(super) fn wait(mut self) {
        if let Some(signal) = self.signals.forever().next() {
            debug!(signal, "ending");
        }
        self.ending.store(true, Ordering::Relaxed);
    }
}
