//! Something to do when the last of several has finished.

use std::fmt;
use std::sync::Arc;

type Then = Box<dyn FnOnce() + Send>;

/// Runs a closure when its last clone is dropped, on the thread that drops it.
///
/// A control operation that several workers take part in gives each of them a clone. A worker that
/// has nothing to wait for just drops it, so no path can forget to answer.
#[derive(Clone)]
pub(crate) struct Latch(#[allow(dead_code, reason = "its drop is its purpose")] Arc<Inner>);

struct Inner(std::sync::Mutex<Option<Then>>);

impl Latch {
    pub(crate) fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Self(Arc::new(Inner(std::sync::Mutex::new(Some(Box::new(then))))))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let then = self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(then) = then {
            then();
        }
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Latch")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn runs_once_and_only_at_the_end() {
        let ran = Arc::new(AtomicU32::new(0));
        let latch = Latch::new({
            let ran = Arc::clone(&ran);
            move || {
                ran.fetch_add(1, Ordering::Relaxed);
            }
        });
        let other = latch.clone();
        drop(latch);
        assert_eq!(ran.load(Ordering::Relaxed), 0);
        std::thread::spawn(move || drop(other)).join().unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
    }
}
