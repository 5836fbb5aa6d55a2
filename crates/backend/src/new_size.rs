//! Word that the storage below a disk has another size.
//!
//! A disk that is told so by its storage takes note ([`Disk::takes_new_size`]) and says that there
//! is news. Who serves disks sleeps until then, and looks at all that it has.
//!
//! [`Disk::takes_new_size`]: crate::Disk::takes_new_size

use parking_lot::{Condvar, Mutex};

/// How often there was news, of whichever disk of the process.
static NEWS: Mutex<u64> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

/// A disk may have another size, and has taken note of it: whoever waits looks. Also for who is to
/// wait no longer.
pub fn tell_new_size() {
    *NEWS.lock() += 1;
    CHANGED.notify_all();
}

/// What somebody has heard of.
#[derive(Debug, Default)]
pub struct SizeNews(u64);

impl SizeNews {
    /// Waits until there was news since it returned last.
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
