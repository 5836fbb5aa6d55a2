//! Process-wide notification of disk size changes.
//!
//! A disk whose storage signals a new size sets a flag ([`Disk::takes_new_size`]) and calls
//! [`tell_new_size`]. The thread that applies size changes sleeps in [`SizeNews::wait`] and then
//! checks all disks.
//!
//! [`Disk::takes_new_size`]: crate::Disk::takes_new_size

use parking_lot::{Condvar, Mutex};

/// Number of notifications, over all disks of the process.
static NEWS: Mutex<u64> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

/// Wakes all waiters because a disk may have a new size, or because a waiter has to end.
pub fn tell_new_size() {
    *NEWS.lock() += 1;
    CHANGED.notify_all();
}

/// Position of one waiter in the sequence of notifications.
#[derive(Debug, Default)]
pub struct SizeNews(u64);

impl SizeNews {
    /// Blocks until a notification arrives after the previous return.
    pub fn wait(&mut self) {
        let mut news = NEWS.lock();
        let mut is_old = |news: &mut u64| *news == self.0;
        CHANGED.wait_while(&mut news, &mut is_old);
        self.0 = *news;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_told_of_what_was_before_and_of_what_comes() {
        tell_new_size();
        let mut news = SizeNews::default();
        news.wait();
        let teller = std::thread::spawn(tell_new_size);
        news.wait();
        teller.join().unwrap();
    }
}
