//! The filter of system calls: seccomp.

use super::calls;
use anyhow::Context;
use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use syscalls::Sysno;

/// What not every server needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// A keeper tells the service manager what is to be told.
    pub(super) keeper: bool,
    /// Metrics by TCP.
    pub(super) tcp: bool,
    /// No keeper makes its sockets and writes its files.
    pub(super) by_itself: bool,
}

/// From now on a call that is not among [those](calls::all), or has other arguments than it may
/// have, ends the process.
///
/// # Errors
/// The system has no filters.
pub(super) fn install(needs: Needs) -> anyhow::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let calls = calls::all(needs.by_itself).map(|call| Ok((call, rules(call, needs)?)));
    let calls: BTreeMap<_, _> = calls.collect::<Result<_, seccompiler::BackendError>>()?;
    // The arguments of `clone3` are in memory, where a filter can not see them: whoever finds that
    // it is not there takes `clone`. The C library asks on which processors a thread may run when
    // it is asked for the stack of one, and does without. Of two filters the stricter one counts.
    let missing = [libc::SYS_clone3, libc::SYS_sched_getaffinity].map(|call| (call, Vec::new()));
    let missing = BTreeMap::from(missing);
    let calls: BTreeMap<_, _> = calls.into_iter().chain(missing.clone()).collect();
    let allowed = SeccompFilter::new(calls, SeccompAction::Trap, SeccompAction::Allow, arch)?;
    let none = SeccompAction::Errno(libc::ENOSYS as u32);
    let missing = SeccompFilter::new(missing, SeccompAction::Allow, none, arch)?;
    let (allowed, missing) = (BpfProgram::try_from(allowed)?, BpfProgram::try_from(missing)?);
    shadowbell_memory::sigsys::report(name_of).context("SIGSYS can not be caught")?;
    apply_filter_all_threads(&missing)?;
    apply_filter_all_threads(&allowed)?;
    Ok(())
}

/// The name of a system call. It is in a table.
fn name_of(number: usize) -> Option<&'static str> {
    Sysno::new(number).map(|call| call.name())
}

/// What the arguments of a call are to be: one of these. Any, if there are none.
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
        // No code but the program's.
        libc::SYS_mmap | libc::SYS_mprotect => only(without(2, libc::PROT_EXEC as u64)?),
        // A thread, and no process.
        libc::SYS_clone => only(with(0, libc::CLONE_THREAD as u64)?),
        libc::SYS_socket => {
            let mut kinds = vec![(libc::AF_UNIX, libc::SOCK_STREAM)];
            if !needs.keeper {
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
        libc::SYS_prctl => one_of(0, &[libc::PR_SET_NAME as u64]),
        // It stays who ends the process.
        libc::SYS_rt_sigaction => only(is_not(0, libc::SIGSYS as u64)?),
        libc::SYS_kill | libc::SYS_tgkill => one_of(0, &[u64::from(std::process::id())]),
        _ => Ok(Vec::new()),
    }
}

/// How long a file is.
const FIOQSIZE: u64 = 0x5460;
/// How long a block of a device is.
const BLKSSZGET: u64 = 0x1268;
/// A command to a namespace whose character device is a disk. io_uring takes the same ones; those
/// to a controller are the keeper's to give.
const NVME_IOCTL_IO_CMD: u64 = 0xc048_4e43;
/// How long a device is.
const BLKGETSIZE64: u64 = 0x8008_1272;
