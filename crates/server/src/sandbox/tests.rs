//! System calls that a process in the sandbox attempts. docs/internals/sandbox.md has the results.

use super::files::Files;
use super::options::{Mode, SandboxOptions};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketType, sendmsg_addr, socket,
};
use shadowbell_config::config_file;
use shadowbell_memory::sigsys::attempt;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, exit};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Environment variables for the process in the sandbox: its configuration file, whether it has a
/// supervisor, and the system call that it attempts.
const CONFIG: &str = "SHADOWBELL_TEST_CONFIG";
const SUPERVISED: &str = "SHADOWBELL_TEST_SUPERVISED";
const ATTEMPT: &str = "SHADOWBELL_TEST_ATTEMPT";

/// Value that stands for an argument of a system call: the path of an existing file that the
/// process must not open.
const PATH: usize = 1 << 40;

/// Code of the process in the sandbox, which the other tests start.
#[test]
fn attempt_in_the_sandbox() {
    let Ok(wanted) = std::env::var(ATTEMPT) else { return };
    let path = std::env::var(CONFIG).unwrap();
    let supervised = std::env::var(SUPERVISED).unwrap() == "true";
    let config = config_file::read(Path::new(&path)).unwrap();
    let options = SandboxOptions { mode: Mode::On, user: None };
    let files = supervised.then(|| Files::new().unwrap());
    let connecting = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let datagrams = UnixDatagram::unbound().unwrap();
    let receiver = Path::new(&path).with_file_name("receiver.sock");
    let _receiver = UnixDatagram::bind(&receiver).unwrap();
    let receiver = SocketAddrUnix::new(receiver).unwrap();
    let _held = super::close(&options, &config, files, supervised).unwrap();
    if wanted == "rings" {
        print_rings();
    } else if wanted == "capabilities" {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().filter(|line| line.starts_with("Cap")).for_each(|line| println!("{line}"));
    } else if wanted == "datagram" {
        let (bytes, mut control) = ([IoSlice::new(b"x")], SendAncillaryBuffer::default());
        let sent = sendmsg_addr(&datagrams, &receiver, &bytes, &mut control, SendFlags::NOSIGNAL);
        println!("outcome: {}", sent.map_or_else(|error| error.to_string(), |_| "done".into()));
    } else {
        let file = c"/etc/passwd";
        let numbers: Vec<usize> = wanted.split(' ').map(|word| word.parse().unwrap()).collect();
        let argument = |at: usize| match numbers.get(at + 1).copied().unwrap_or(0) {
            PATH => file.as_ptr().expose_provenance(),
            SOCKET => connecting.as_raw_fd() as usize,
            number => number,
        };
        let outcome = attempt(numbers[0] as i64, [0, 1, 2, 3].map(argument));
        println!("outcome: {}", outcome.map_or_else(|error| error.to_string(), |_| "done".into()));
    }
    exit(0);
}

/// Value that stands for an argument of a system call: a descriptor of a Unix socket of the
/// process.
const SOCKET: usize = PATH + 1;

/// Prints the requests that the io_uring instances accept.
fn print_rings() {
    for ring in shadowbell_uring::attempts().unwrap() {
        let registers = [REGISTER_EVENTFD, UNREGISTER_EVENTFD, REGISTER_FILES_UPDATE];
        let is_accepted = |code: &usize| {
            let call = [ring.fd as usize, *code, 0, 0];
            attempt(libc::SYS_io_uring_register, call).err().and_then(|e| e.raw_os_error())
                != Some(libc::EACCES)
        };
        let registers: Vec<_> = registers.into_iter().filter(is_accepted).collect();
        println!("ring: {} {:?} {} {registers:?}", ring.name, ring.opcodes, ring.flags);
    }
}

const REGISTER_EVENTFD: usize = 4;
const UNREGISTER_EVENTFD: usize = 5;
const REGISTER_FILES_UPDATE: usize = 6;

/// Runs an attempt in a process of its own. Returns the output of the process, or an error with the
/// signal that has ended it.
fn run(attempt: &str, supervised: bool) -> Result<String, Option<i32>> {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("server.toml");
    let socket = directory.path().join("vm.sock");
    let text = format!("[[controller]]\nsocket = {socket:?}\ndisks = [\"null:1MiB\"]\n");
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "sandbox::tests::attempt_in_the_sandbox", "--nocapture"]);
    command.env(CONFIG, config).env(ATTEMPT, attempt).env(SUPERVISED, supervised.to_string());
    let output = command.output().unwrap();
    if output.status.code() != Some(0) {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.signal().is_some(), "{attempt}: {}: {errors}", output.status);
        return Err(output.status.signal());
    }
    Ok(String::from_utf8(output.stdout).unwrap())
}

/// Runs attempts, several at a time, and checks their outcomes: the text of an error, "done", or ""
/// if the system call must end the process.
fn check(attempts: &[(String, &str)], supervised: bool) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((attempt, expected)) = attempts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = run(attempt, supervised);
            let outcome = outcome.map(|output| {
                let (_, outcome) = output.split_once("outcome: ").unwrap();
                outcome.lines().next().unwrap_or_default().to_owned()
            });
            match *expected {
                "" => assert_eq!(outcome, Err(Some(libc::SIGSYS)), "{attempt}"),
                expected => {
                    let outcome = outcome.unwrap();
                    assert!(outcome.starts_with(expected), "{attempt}: {outcome}");
                }
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
}

fn call(number: libc::c_long, arguments: &[usize]) -> String {
    let words = [number as usize].into_iter().chain(arguments.iter().copied());
    words.map(|word| word.to_string()).collect::<Vec<_>>().join(" ")
}

#[test]
fn no_path_is_reached_and_no_file_is_changed() {
    const AT: usize = libc::AT_FDCWD as usize;
    const O_WRONLY: usize = libc::O_WRONLY as usize;
    let denied = "Permission denied";
    let attempts = [
        (libc::SYS_openat, vec![AT, PATH, 0], denied),
        (libc::SYS_openat, vec![AT, PATH, O_WRONLY], denied),
        (libc::SYS_openat2, vec![AT, PATH, 0, 24], ""),
        (libc::SYS_linkat, vec![AT, PATH, AT, PATH], ""),
        (libc::SYS_symlinkat, vec![PATH, AT, PATH], ""),
        (libc::SYS_unlinkat, vec![AT, PATH, 0], ""),
        (libc::SYS_renameat2, vec![AT, PATH, AT, PATH], ""),
        (libc::SYS_mkdirat, vec![AT, PATH, 0o755], ""),
        (libc::SYS_mknodat, vec![AT, PATH, 0o644, 0], ""),
        (libc::SYS_fchmodat, vec![AT, PATH, 0o666], ""),
        (libc::SYS_fchmod, vec![2, 0o666], ""),
        (libc::SYS_fchownat, vec![AT, PATH, 0, 0], ""),
        (libc::SYS_fchown, vec![2, 0, 0], ""),
        (libc::SYS_setxattr, vec![PATH, PATH, PATH, 1], ""),
        (libc::SYS_lsetxattr, vec![PATH, PATH, PATH, 1], ""),
        (libc::SYS_fsetxattr, vec![2, PATH, PATH, 1], ""),
        (libc::SYS_removexattr, vec![PATH, PATH], ""),
        (libc::SYS_utimensat, vec![AT, PATH, 0, 0], ""),
        (libc::SYS_truncate, vec![PATH, 0], ""),
        (libc::SYS_connect, vec![SOCKET, PATH, 12], ""),
        (libc::SYS_bind, vec![SOCKET, PATH, 12], ""),
        (libc::SYS_listen, vec![SOCKET, 1], ""),
        (libc::SYS_mount, vec![PATH, PATH, PATH, 0], ""),
        (libc::SYS_chroot, vec![PATH], ""),
        (libc::SYS_unshare, vec![0], ""),
        (libc::SYS_capset, vec![PATH, PATH], ""),
        (libc::SYS_setresuid, vec![0, 0, 0], ""),
        (libc::SYS_io_uring_setup, vec![1, PATH], ""),
    ];
    let attempts =
        attempts.map(|(number, arguments, expected)| (call(number, &arguments), expected));
    check(&attempts, true);
}

/// The address of a datagram is not visible to the filter, so only Landlock of Linux 7.1 prevents
/// that a process sends to a path. The socket stands for one that a client has passed.
#[test]
fn a_datagram_reaches_a_path_without_a_new_landlock() {
    let outcome = run("datagram", true).unwrap();
    let results = ["outcome: done", "outcome: Permission denied"];
    assert!(results.iter().any(|result| outcome.contains(result)), "{outcome}");
}

/// A closed TCP socket does not connect by a message with the flag `MSG_FASTOPEN`.
#[test]
fn no_message_connects_a_socket() {
    const FASTOPEN: usize = libc::MSG_FASTOPEN as usize;
    let invalid = "Bad address";
    check(
        &[
            (call(libc::SYS_sendmsg, &[SOCKET, 1, 0]), invalid),
            (call(libc::SYS_sendmsg, &[SOCKET, 1, FASTOPEN]), ""),
        ],
        true,
    );
    check(&[(call(libc::SYS_sendto, &[SOCKET, 1, 1, FASTOPEN]), "")], false);
}

#[test]
fn sockets_of_no_family_are_created() {
    // The kernel has 46 address families, so these numbers include all of them.
    let families = |kind: i32| (0..48).map(move |family| (family, kind));
    let kinds = [libc::SOCK_STREAM, libc::SOCK_RAW];
    let all: Vec<_> = kinds.into_iter().flat_map(families).collect();
    let socket = |(family, kind): (usize, i32)| call(libc::SYS_socket, &[family, kind as usize]);
    let with_supervisor: Vec<_> = all.iter().map(|it| (socket(*it), "")).collect();
    check(&with_supervisor, true);
    // Without a supervisor, the process creates Unix sockets by itself.
    let permitted = (libc::AF_UNIX as usize, libc::SOCK_STREAM);
    let expected = |it| if it == permitted { "done" } else { "" };
    let alone: Vec<_> = all.iter().map(|it| (socket(*it), expected(*it))).collect();
    check(&alone, false);
}

/// A thread can change its scheduling class only to the idle class, and not that of other threads.
#[test]
fn a_thread_becomes_idle_and_changes_no_other() {
    let set = |thread: usize, class: libc::c_int| {
        call(libc::SYS_sched_setscheduler, &[thread, class as usize, PATH])
    };
    // The scheduling parameter is invalid, so that the permitted call fails in the kernel.
    let attempts = [
        (set(0, libc::SCHED_IDLE), "Invalid argument"),
        (set(1, libc::SCHED_IDLE), ""),
        (set(0, libc::SCHED_OTHER), ""),
        (set(0, libc::SCHED_FIFO), ""),
        (set(0, libc::SCHED_IDLE | libc::SCHED_RESET_ON_FORK), ""),
    ];
    check(&attempts, true);
}

/// The io_uring instances accept only the requests that the server makes, and cannot be changed.
#[test]
fn rings_accept_only_the_requests_in_use() {
    for supervised in [true, false] {
        let output = run("rings", supervised).unwrap();
        let rings: Vec<_> = output.lines().filter_map(|line| line.split_once("ring: ")).collect();
        let rings: Vec<_> = rings.into_iter().map(|(_, ring)| ring).collect();
        let expected = [
            "replies [10, 23] 0 []",
            "signals [0] 0 [4, 5]",
            "NVMe commands [0, 14, 46] 1 [6]",
            "files [0, 1, 2, 14, 17, 22, 23] 1 [6]",
        ];
        assert_eq!(rings, expected);
    }
    let register = |code: usize| call(libc::SYS_io_uring_register, &[0, code]);
    let attempts: Vec<_> = (0..48)
        .map(|code| match code {
            REGISTER_EVENTFD | UNREGISTER_EVENTFD | REGISTER_FILES_UPDATE => {
                (register(code), "Operation not supported")
            }
            code => (register(code), ""),
        })
        .collect();
    check(&attempts, true);
}

#[test]
fn capabilities_are_dropped() {
    const SYS_RESOURCE: u64 = 1 << 24;
    let sets = |supervised| {
        let output = run("capabilities", supervised).unwrap();
        let lines = output.lines().filter_map(|line| line.split_once("Cap")?.1.split_once(":\t"));
        let sets =
            lines.map(|(set, bits)| (set.to_owned(), u64::from_str_radix(bits, 16).unwrap()));
        sets.collect::<Vec<_>>()
    };
    let is_root = rustix::process::geteuid().is_root();
    for (set, bits) in sets(true) {
        // An unprivileged process cannot change its bounding set, which then does not matter.
        assert!(bits & !SYS_RESOURCE == 0 || set == "Bnd" && !is_root, "{set}: {bits:x}");
    }
    // The bits 0xf are CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH and FOWNER.
    for (set, bits) in sets(false) {
        assert!(bits & !(SYS_RESOURCE | 0xf) == 0 || set == "Bnd" && !is_root, "{set}: {bits:x}");
    }
}
