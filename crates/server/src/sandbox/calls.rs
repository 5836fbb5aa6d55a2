//! System calls that the sandbox allows. docs/internals/sandbox.md has the purpose of each.

use libc::c_long;

/// System calls of every process, by purpose.
static CALLS: &[&[c_long]] = &[
    // Memory of guests, disks and the program.
    &[
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
    ],
    // Access to open files.
    &[
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_pread64,
        libc::SYS_preadv2,
        libc::SYS_pwritev2,
        libc::SYS_close,
        libc::SYS_lseek,
        libc::SYS_fcntl,
        libc::SYS_ioctl,
        libc::SYS_ftruncate,
        libc::SYS_fallocate,
        libc::SYS_fdatasync,
        libc::SYS_statx,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_newfstatat,
        libc::SYS_fstatfs,
    ],
    // Files of procfs and sysfs.
    &[
        libc::SYS_openat,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_readlink,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_readlinkat,
    ],
    // Sockets: connections to clients, `ctl`, the supervisor, and at an upgrade the next
    // process.
    &[
        libc::SYS_accept4,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_getsockopt,
        libc::SYS_setsockopt,
        libc::SYS_shutdown,
    ],
    // Disks, events and time.
    &[
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_ppoll,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_eventfd2,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime,
        libc::SYS_clock_gettime,
        libc::SYS_clock_nanosleep,
        libc::SYS_restart_syscall,
    ],
    // Threads and scheduling.
    &[
        libc::SYS_clone,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_futex,
        libc::SYS_sched_yield,
        libc::SYS_sched_setaffinity,
        // Threads that decompress images run in the idle class.
        libc::SYS_sched_setscheduler,
        libc::SYS_getrusage,
        libc::SYS_sigaltstack,
        libc::SYS_prctl,
        libc::SYS_exit,
        libc::SYS_gettid,
        libc::SYS_getpid,
    ],
    // Signals, faults and exit.
    &[
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_tgkill,
        libc::SYS_exit_group,
    ],
    // Random numbers.
    &[libc::SYS_getrandom],
    // In a build with fault injection, these kill the process at an abort point.
    #[cfg(feature = "faults")]
    &[
        libc::SYS_kill,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename,
    ],
];

/// Further system calls of a process that creates its sockets and files itself.
static BY_ITSELF: &[&[c_long]] = &[
    // Files and directories by path.
    &[
        #[cfg(target_arch = "x86_64")]
        libc::SYS_unlink,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_unlinkat,
        libc::SYS_renameat,
        libc::SYS_renameat2,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_link,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_linkat,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_mkdir,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_mkdirat,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rmdir,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod,
        #[cfg(not(target_arch = "x86_64"))]
        libc::SYS_fchmodat,
        libc::SYS_fchownat,
        libc::SYS_getcwd,
        libc::SYS_flock,
    ],
    // Creation of sockets.
    &[
        libc::SYS_socket,
        libc::SYS_socketpair,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_connect,
        libc::SYS_getsockname,
        libc::SYS_sendto,
    ],
];

/// Further system calls for signals to eventfds on kernels that are too old for io_uring.
pub(super) static AIO: &[c_long] = &[libc::SYS_io_submit, libc::SYS_io_getevents];

/// Returns all allowed system calls. `by_itself`: the process creates sockets and files itself.
pub(super) fn all(by_itself: bool) -> impl Iterator<Item = c_long> {
    let more = if by_itself { BY_ITSELF } else { &[] };
    CALLS.iter().chain(more).copied().flatten().copied()
}

#[cfg(test)]
mod tests {
    use syscalls::Sysno;

    #[test]
    fn each_call_is_in_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/internals/sandbox.md");
        let page = std::fs::read_to_string(page).unwrap();
        let listed = page.split_once("## System calls").unwrap().1;
        for (by_itself, words) in [(false, "with a supervisor has"), (true, "one without has")] {
            let names = super::all(by_itself).map(|call| Sysno::new(call as usize).unwrap().name());
            let names: Vec<_> = names.filter(|name| !["kill", "rename"].contains(name)).collect();
            for name in &names {
                assert!(
                    listed.contains(&format!("`{name}`")),
                    "{name} is not in docs/internals/sandbox.md"
                );
            }
            assert!(by_itself || names.len() <= 61, "{}", names.len());
            if cfg!(target_arch = "x86_64") {
                let count = format!("{words} {}", names.len());
                assert!(listed.contains(&count), "{count}");
            }
        }
    }
}
