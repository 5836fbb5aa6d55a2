//! System call that `rustix` does not have.

/// Lets the calling thread run only when a CPU has nothing else to do (`SCHED_IDLE`). If that is
/// not allowed, the priority stays as it is.
pub(crate) fn be_idle() {
    // SAFETY: `sched_param` is plain data for which zeroes are valid values, and the call only
    // reads it. The call affects the calling thread alone.
    unsafe {
        let parameter: libc::sched_param = std::mem::zeroed();
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter);
    }
}
