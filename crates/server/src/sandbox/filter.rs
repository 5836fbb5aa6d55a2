//! Seccomp filter of system calls.

use super::calls;
use anyhow::Context;
use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads,
};
use shadowbell_uring::register;
use std::collections::BTreeMap;
use syscalls::Sysno;

/// Options of the filter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// True if there is a supervisor, so that this process does not notify the service manager
    /// itself.
    pub(super) supervisor: bool,
    /// True if metrics or exports are served over TCP.
    pub(super) tcp: bool,
    /// True if the process creates its sockets and files itself.
    pub(super) by_itself: bool,
    /// True if eventfds are signalled by Linux AIO.
    pub(super) aio: bool,
}

/// Installs the filter, after which a system call that is not [allowed](calls::all), or has other
/// arguments than permitted, ends the process.
///
/// # Errors
/// The kernel does not support seccomp filters.
pub(super) fn install(needs: Needs) -> anyhow::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let aio = if needs.aio { calls::AIO } else { &[] };
    let calls = calls::all(needs.by_itself).chain(aio.iter().copied());
    let calls = calls.map(|call| Ok((call, rules(call, needs)?)));
    let calls: BTreeMap<_, _> = calls.collect::<Result<_, seccompiler::BackendError>>()?;
    // Two calls fail with ENOSYS instead. A filter cannot check the arguments of `clone3`, which
    // are in memory; the C library falls back to `clone`. `sched_getaffinity` is called by
    // `pthread_getattr_np`, which tolerates the error. A second filter returns the error; of two
    // filters, the stricter result applies.
    let missing = [libc::SYS_clone3, libc::SYS_sched_getaffinity].map(|call| (call, Vec::new()));
    let missing = BTreeMap::from(missing);
    let calls: BTreeMap<_, _> = calls.into_iter().chain(missing.clone()).collect();
    let allowed = SeccompFilter::new(calls, SeccompAction::Trap, SeccompAction::Allow, arch)?;
    let none = SeccompAction::Errno(libc::ENOSYS as u32);
    let missing = SeccompFilter::new(missing, SeccompAction::Allow, none, arch)?;
    let (allowed, missing) = (BpfProgram::try_from(allowed)?, BpfProgram::try_from(missing)?);
    shadowbell_memory::sigsys::report(name_of).context("cannot handle SIGSYS")?;
    apply_filter_all_threads(&missing)?;
    apply_filter_all_threads(&allowed)?;
    Ok(())
}

/// Returns the name of a system call. Signal-safe, because the names are in a static table.
fn name_of(number: usize) -> Option<&'static str> {
    Sysno::new(number).map(|call| call.name())
}

/// Returns the argument rules of a system call. The arguments have to match at least one of the
/// rules. Without rules, all arguments are permitted.
fn rules(call: c_long, needs: Needs) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let is = |argument, value| SeccompCondition::new(argument, Len::Dword, Op::Eq, value);
    let is_not = |argument, value| SeccompCondition::new(argument, Len::Dword, Op::Ne, value);
    let without =
        |argument, bits: u64| SeccompCondition::new(argument, Len::Dword, Op::MaskedEq(bits), 0);
    let with =
        |argument, bits: u64| SeccompCondition::new(argument, Len::Dword, Op::MaskedEq(bits), bits);
    let one_of = |argument, values: &[u64]| {
        values.iter().map(|value| SeccompRule::new(vec![is(argument, *value)?])).collect()
    };
    let only = |condition| Ok(vec![SeccompRule::new(vec![condition])?]);
    match call {
        // Memory must not be executable.
        libc::SYS_mmap | libc::SYS_mprotect => only(without(2, libc::PROT_EXEC as u64)?),
        // Only threads can be created, no processes.
        libc::SYS_clone => only(with(0, libc::CLONE_THREAD as u64)?),
        libc::SYS_socket => {
            let mut kinds = vec![(libc::AF_UNIX, libc::SOCK_STREAM)];
            if !needs.supervisor {
                kinds.push((libc::AF_UNIX, libc::SOCK_DGRAM));
            }
            if needs.tcp {
                kinds.push((libc::AF_INET, libc::SOCK_STREAM));
                kinds.push((libc::AF_INET6, libc::SOCK_STREAM));
            }
            let rule = |(domain, kind): (i32, i32)| {
                let kind = SeccompCondition::new(1, Len::Dword, Op::MaskedEq(0xf), kind as u64)?;
                SeccompRule::new(vec![is(0, domain as u64)?, kind])
            };
            kinds.into_iter().map(rule).collect()
        }
        // With this flag, a closed TCP socket connects, which Landlock does not see.
        libc::SYS_sendmsg => only(without(2, libc::MSG_FASTOPEN as u64)?),
        libc::SYS_sendto => only(without(3, libc::MSG_FASTOPEN as u64)?),
        libc::SYS_socketpair => only(is(0, libc::AF_UNIX as u64)?),
        libc::SYS_ioctl => one_of(
            1,
            &[
                libc::FIONBIO,
                libc::FIONREAD,
                libc::TCGETS,
                FIOQSIZE,
                BLKSSZGET,
                BLKGETSIZE64,
                NVME_IOCTL_IO_CMD,
            ],
        ),
        // Only the files and the eventfd of an io_uring instance can be changed. The instances have
        // restrictions of their own.
        libc::SYS_io_uring_register => one_of(
            1,
            &[register::EVENTFD, register::UNREGISTER_EVENTFD, register::FILES_UPDATE]
                .map(u64::from),
        ),
        libc::SYS_prctl => one_of(0, &[libc::PR_SET_NAME as u64]),
        // Only the calling thread can change its class, and only to the idle class.
        libc::SYS_sched_setscheduler => {
            Ok(vec![SeccompRule::new(vec![is(0, 0)?, is(1, libc::SCHED_IDLE as u64)?])?])
        }
        // The SIGSYS handler, which ends the process, cannot be replaced.
        libc::SYS_rt_sigaction => only(is_not(0, libc::SIGSYS as u64)?),
        libc::SYS_kill | libc::SYS_tgkill => one_of(0, &[u64::from(std::process::id())]),
        _ => Ok(Vec::new()),
    }
}

/// Ioctl that returns a file's size.
const FIOQSIZE: u64 = 0x5460;
/// Ioctl that returns a block device's block size.
const BLKSSZGET: u64 = 0x1268;
/// Ioctl that passes an I/O command to the character device of an NVMe namespace, as io_uring does.
/// Admin commands are executed by the supervisor.
const NVME_IOCTL_IO_CMD: u64 = 0xc048_4e43;
/// Ioctl that returns a block device's size.
const BLKGETSIZE64: u64 = 0x8008_1272;
