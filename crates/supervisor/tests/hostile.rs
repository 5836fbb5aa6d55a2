//! Campaign of a compromised server process against its supervisor, over the supervisor's real
//! sockets: floods of each message, requests outside of the permissions, descriptors that are slow
//! to close, a full log, and a death with many messages queued. No file, socket or process outside
//! of the grants may change, and the shutdown has to begin while the flood continues. Each attack
//! is made without a service manager, and with one that stores descriptors.
//!
//! The test program starts itself as the supervisor (`serve`), which starts the same program as the
//! server process (`--as-worker`). The first argument is the number of messages before the
//! shutdown; with a million or more the shutdown must begin within 100 ms. Further arguments select
//! attacks.

use rustix::net::sockopt::{
    Timeout, set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
    set_socket_timeout,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect};
use shadowbell_supervisor::checkpoint::{Change, packets};
use shadowbell_supervisor::path_protocol::{self as paths, Kind, Made};
use shadowbell_supervisor::permissions::{Permissions, bytes_of};
use shadowbell_supervisor::protocol::{
    self, AS_WORKER, START, answer, open_broker as images, question, send_bytes, to_supervisor,
    to_worker,
};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::{LIMIT, pause};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Environment variables of the hostile process: attack, number of messages, directory.
const VARIABLES: [&str; 3] = ["HOSTILE_ATTACK", "HOSTILE_COUNT", "HOSTILE_DIRECTORY"];

/// Number of messages before the shutdown, without an argument.
const FEW: usize = 2000;
/// Number of checkpoint keys. Items with so many keys need more memory than the limit of a
/// checkpoint.
const MANY_KEYS: usize = 400_000;
/// Minimum number of messages at which the test also checks how soon the shutdown begins.
const CAMPAIGN: usize = 1_000_000;
/// Time within which a shutdown has to begin.
const BEGINS: Duration = Duration::from_millis(100);

/// Attacks on the main socket that repeat one message: name of the attack, and code of the message.
/// `QUIESCED` is not in the list, because the supervisor kills a process that has sent it.
const MESSAGES: [(&str, u8); 14] = [
    ("SOCKET", to_supervisor::SOCKET),
    ("SERVING", to_supervisor::SERVING),
    ("READ", to_supervisor::READ),
    ("ALIVE", to_supervisor::ALIVE),
    ("WARNING", to_supervisor::WARNING),
    ("PREPARED", to_supervisor::PREPARED),
    ("CHECKED", to_supervisor::CHECKED),
    ("RESUMES", to_supervisor::RESUMES),
    ("FAILED", to_supervisor::FAILED),
    ("RECOVERED", to_supervisor::RECOVERED),
    ("FORGET", to_supervisor::FORGET),
    ("UPGRADE", to_supervisor::UPGRADE),
    ("CHECKPOINT", to_supervisor::CHECKPOINT),
    ("unknown", b'?'),
];

/// Attacks other than the repetition of one message.
const OTHERS: [&str; 10] = [
    "checkpoint with descriptors",
    "many keys",
    "slow descriptors",
    "images",
    "paths",
    LARGE.0,
    HUGE.0,
    FULL_LOG,
    DIES,
    ENDS_LINK,
];

/// Attacks with many transactions of two packets, for each of which the supervisor writes snapshots
/// of its state: name of the attack, and number of checkpoint items. A state of the first size is
/// stored in the service manager's fd store, and one of the second size is too large for it.
const LARGE: (&str, usize) = ("large state", 850);
const HUGE: (&str, usize) = ("huge state", 10_000);
/// Number of messages of other attacks for one such transaction.
const PER_TRANSACTION: usize = 500;

/// Attack that fills the pipe of the log, which no process reads.
const FULL_LOG: &str = "full log";

/// Attack in which the server process dies with many transactions in its socket, which another
/// process still holds.
const DIES: &str = "death";

/// Attack that closes the server process's connection to the supervisor.
const ENDS_LINK: &str = "empty packets";

/// Maximum memory of a supervisor whose checkpoint was flooded, in KiB.
const MEMORY: u64 = 350 << 10;

/// User id of another user.
const OTHER_USER: u32 = 65534;

/// Service manager of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manager {
    /// No service manager.
    None,
    /// Stores the descriptors and reads all notifications.
    Stores,
    /// Drops the descriptors, and reads no notification after the supervisor is ready.
    Drops,
}

impl Manager {
    /// Serves the socket until the supervisor is ready, or until the socket is shut down.
    fn run(self, socket: &UnixDatagram) {
        let mut stored = Vec::new();
        while let Ok(Some(packet)) = protocol::receive(socket, false) {
            let is_ready = packet.text().contains("EADY=1");
            match self {
                Self::Drops if is_ready => break,
                Self::Drops | Self::None => {}
                Self::Stores => stored.extend(packet.fds),
            }
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if arguments.iter().any(|word| word == AS_WORKER) {
        hostile(arguments.iter().any(|word| word == START));
        return ExitCode::SUCCESS;
    }
    if arguments.get(1).is_some_and(|word| word == "serve") {
        return shadowbell_supervisor::run(arguments, permit);
    }
    if arguments.get(1).is_some_and(|word| word == "stranger") {
        return stranger(&arguments[2]);
    }
    let words: Vec<_> = arguments.iter().skip(1).filter_map(|word| word.to_str()).collect();
    let count = words.first().and_then(|word| word.parse().ok()).unwrap_or(FEW);
    if words.contains(&"--list") {
        return ExitCode::SUCCESS;
    }
    let all = || MESSAGES.iter().map(|(name, _)| *name).chain(OTHERS);
    let is_wanted = |name: &&str| words.contains(name) || !all().any(|one| words.contains(&one));
    for (nth, attack) in all().enumerate().filter(|(_, attack)| is_wanted(attack)) {
        let with_store = if nth % 2 == 0 { Manager::Stores } else { Manager::Drops };
        for manager in [Manager::None, with_store] {
            let took = withstands(attack, count, manager);
            println!("{attack} ({manager:?}): the shutdown began after {} ms", took.as_millis());
            assert!(count < CAMPAIGN || took <= BEGINS, "{attack}: {took:?}");
        }
    }
    ExitCode::SUCCESS
}

/// Permissions of the test: one image and a directory of sockets.
fn permit(_: &[OsString], _: Option<&str>) -> anyhow::Result<Permissions> {
    let at = |name: &str| bytes_of(&directory().join(name));
    Ok(Permissions {
        images: vec![at("image")],
        sockets: vec![at("sockets/vm.sock")],
        socket_trees: vec![at("sockets")],
        ..Permissions::default()
    })
}

fn directory() -> PathBuf {
    std::env::var_os(VARIABLES[2]).expect("set by the test").into()
}

/// Lists the files for which the server process has no permission: name, type and mode, inode,
/// times, size and content.
fn outside(root: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for name in ["secret", "other.sock", "stale.sock", "sockets/other.sock", "sockets/stale.sock"] {
        let path = root.join(name);
        let about = path.symlink_metadata().expect("the file is there");
        let content = std::fs::read(&path).unwrap_or_default();
        let (ino, mode, uid, gid) = (about.ino(), about.mode(), about.uid(), about.gid());
        let (size, mtime, ctime) = (about.size(), about.mtime_nsec(), about.ctime_nsec());
        all.push(format!("{name} {ino} {mode:o} {uid} {gid} {size} {mtime} {ctime} {content:?}"));
    }
    let mut names: Vec<_> = root.read_dir().expect("a directory").flatten().collect();
    names.sort_by_key(std::fs::DirEntry::file_name);
    all.extend(names.iter().map(|entry| format!("{:?}", entry.file_name())));
    all
}

/// Runs an attack, ends the supervisor during the attack, and returns the time until its shutdown
/// began.
fn withstands(attack: &str, count: usize, manager: Manager) -> Duration {
    let root = tempfile::tempdir().expect("a directory");
    let at = |name: &str| root.path().join(name);
    std::fs::create_dir(at("sockets")).expect("a directory");
    std::fs::create_dir(at("empty")).expect("a directory");
    for name in ["image", "secret"] {
        std::fs::write(at(name), name).expect("a file");
        std::fs::set_permissions(at(name), PermissionsExt::from_mode(0o600)).expect("a mode");
    }
    let listen = |name: &str| UnixListener::bind(at(name)).expect("a socket");
    for listener in ["other.sock", "sockets/other.sock"].map(listen) {
        // The supervisor connects to a socket to check whether it is in use, so these sockets must
        // accept connections.
        std::thread::spawn(move || listener.incoming().for_each(drop));
    }
    drop(["stale.sock", "sockets/stale.sock"].map(listen));
    let notify = UnixDatagram::bind(at("notify")).expect("a socket");
    let mut bystander = ProcessGroup::spawn(Command::new("sleep").arg("3600")).expect("sleep");
    let before = outside(root.path());
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg("serve").stdin(Stdio::null()).stdout(Stdio::piped());
    let path = root.path().as_os_str().to_owned();
    let values = [attack.into(), count.to_string().into(), path];
    command.envs(VARIABLES.into_iter().zip(values)).env_remove("NOTIFY_SOCKET");
    if manager != Manager::None {
        command.env("NOTIFY_SOCKET", at("notify")).env("FDSTORE", "4");
    }
    let (_unread, full) = io::pipe().expect("a pipe");
    if attack == FULL_LOG {
        command.stderr(full);
    }
    let served = notify.try_clone().expect("a copy");
    let service_manager = std::thread::spawn(move || manager.run(&served));
    let mut supervisor = ProcessGroup::spawn(&mut command).expect("the supervisor");
    drop(command);
    let mut lines = BufReader::new(supervisor.stdout.take().expect("a pipe")).lines();
    let mut line = |expected: &str| loop {
        let line = lines.next().expect("the process is alive").expect("a line");
        assert!(!line.starts_with("breach"), "{attack}: {line}");
        if line == expected {
            break;
        }
    };
    line("flooding");
    if attack == "many keys" {
        let memory = resident(supervisor.id());
        assert!(memory < MEMORY, "{attack}: {memory} KiB");
    }
    if attack == "UPGRADE" {
        refuses_another_user(supervisor.id());
    }
    let began = Instant::now();
    let pid = rustix::process::Pid::from_child(&supervisor);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    // In these attacks, no server process receives the request to end: the supervisor has killed
    // it, because its connection has ended, or it has died.
    let is_ended = attack == ENDS_LINK || attack == DIES;
    let expected = if is_ended { None } else { Some("end") };
    expected.into_iter().for_each(&mut line);
    let status = is_ended.then(|| supervisor.wait());
    let took = began.elapsed();
    notify.shutdown(Shutdown::Both).expect("a socket");
    service_manager.join().expect("a thread");
    assert!(bystander.try_wait().expect("a process").is_none(), "{attack}: the bystander died");
    assert_eq!(outside(root.path()), before, "{attack}");
    let connects = |name: &str| UnixStream::connect(at(name)).is_ok();
    assert!(connects("other.sock") && connects("sockets/other.sock"), "{attack}");
    let status = status.unwrap_or_else(|| supervisor.wait());
    // If the next server process was started before the signal, it ends with success.
    let is_expected = attack == DIES && status.code() == Some(0);
    assert!(is_expected || status.code() == Some(i32::from(is_ended)), "{attack}: {status}");
    took
}

/// Resident memory of a process, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Checks that the supervisor does not answer requests of another user at its control socket.
fn refuses_another_user(supervisor: u32) {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can be another user");
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg("stranger").arg(supervisor.to_string()).uid(OTHER_USER);
    let status = command.status().expect("this program");
    assert!(status.success(), "the request of another user: {status}");
}

/// Sends requests as another user. Succeeds if the supervisor answers none.
fn stranger(supervisor: &std::ffi::OsStr) -> ExitCode {
    let pid = supervisor.to_str().and_then(|pid| pid.parse().ok()).expect("a number");
    let address = SocketAddrUnix::new_abstract_name(protocol::name(pid, 0).as_bytes());
    let grants = [question::GRANT, question::GRANT_SOCKET];
    for code in [question::IS_YOURS, question::SERVES, question::UPGRADE].into_iter().chain(grants)
    {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
        let socket = socket.expect("a socket");
        connect(&socket, address.as_ref().expect("an address")).expect("a supervisor");
        let body = supervisor.as_encoded_bytes();
        // An error is ignored, because the supervisor may have closed the connection already.
        let _ = send_bytes(&socket, code, body, &[], false);
        let answer = protocol::receive(&socket, false);
        if matches!(answer, Ok(Some(_))) {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// True if the shutdown has begun.
static END: AtomicBool = AtomicBool::new(false);

/// Prints a line for the test.
fn tell(line: &str) {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the test reads");
}

/// Runs the compromised server process. `is_first` is false if it was started for an upgrade.
fn hostile(is_first: bool) {
    let link = io::stdin().as_fd().try_clone_to_owned().expect("the link");
    let first = protocol::receive(&link, false).expect("a message").expect("a message");
    assert_eq!((first.code, first.fds.len()), (to_worker::BEGIN, 2));
    let brokers: [OwnedFd; 2] = first.fds.try_into().expect("two sockets");
    let ear = link.try_clone().expect("a copy");
    let listener = std::thread::spawn(move || {
        while let Ok(Some(packet)) = protocol::receive(&ear, false) {
            if packet.code == to_worker::END {
                END.store(true, Ordering::Release);
                tell("end");
                return;
            }
        }
        if std::env::var(VARIABLES[0]).is_ok_and(|attack| attack == ENDS_LINK) {
            loop {
                std::thread::park();
            }
        }
        std::process::exit(1);
    });
    if !is_first {
        listener.join().expect("a thread");
        return;
    }
    protocol::send(&link, to_supervisor::SERVING, "serves", None).expect("a message");
    let variable = |at: usize| std::env::var(VARIABLES[at]).expect("set by the test");
    let (attack, count) = (variable(0), variable(1).parse().expect("a number"));
    match &*attack {
        "images" => repeat(count, |number| ask_for_images(&brokers[0], number)),
        "paths" => repeat(count, |number| ask_for_paths(&brokers[1], number)),
        "slow descriptors" => {
            let supervisor = rustix::process::getppid().expect("a parent");
            let signal = |signal| {
                rustix::process::kill_process(supervisor, signal).expect("a signal");
            };
            // The supervisor is stopped until this process has closed its own copies of the
            // sockets. Then the supervisor has the last copies, whose close is slow.
            signal(rustix::process::Signal::STOP);
            for _ in 0..64 {
                let (socket, reader) = slow_to_close();
                std::mem::forget(reader);
                give(&link, b'?', &[], &[socket.as_fd()]);
            }
            signal(rustix::process::Signal::CONT);
            // The supervisor refuses the second upgrade request. The refusal shows that it has
            // handled all messages before it.
            let (ours, theirs) = protocol::pair().expect("a pair");
            for fds in [&[][..], &[theirs.as_fd()]] {
                give(&link, to_supervisor::UPGRADE, b"", fds);
            }
            set_socket_timeout(&ours, Timeout::Recv, Some(LIMIT)).expect("a socket");
            let answer = protocol::receive(&ours, false).expect("an answer").expect("an answer");
            assert_eq!(answer.code, answer::NO, "{}", answer.text());
            repeat(count, |number| give(&link, b'?', &number.to_le_bytes(), &[]));
        }
        name if name == LARGE.0 || name == HUGE.0 => {
            fill_checkpoint(&link, if name == LARGE.0 { LARGE.1 } else { HUGE.1 });
            repeat(count / PER_TRANSACTION, |_| {
                while !transaction(&link) && !END.load(Ordering::Acquire) {
                    pause();
                }
            });
        }
        FULL_LOG => {
            let log = io::stderr();
            rustix::io::ioctl_fionbio(&log, true).expect("a pipe");
            for size in [4096, 1] {
                while rustix::io::write(&log, &vec![b'x'; size]).is_ok() {}
            }
            rustix::io::ioctl_fionbio(&log, false).expect("a pipe");
            // The supervisor logs that the checkpoint cannot be stored.
            give(&link, to_supervisor::CHECKPOINT, b"\x03?", &[]);
            repeat(count, |number| give(&link, b'?', &number.to_le_bytes(), &[]));
        }
        DIES => {
            fill_checkpoint(&link, LARGE.1);
            let supervisor = rustix::process::getppid().expect("a parent");
            let signal =
                |pid, signal| rustix::process::kill_process(pid, signal).expect("a signal");
            let mut holder = Command::new("sleep");
            holder.arg("3600").stdin(link.try_clone().expect("a copy")).stdout(Stdio::null());
            drop(holder.spawn().expect("sleep"));
            signal(supervisor, rustix::process::Signal::STOP);
            while transaction(&link) {}
            tell("flooding");
            signal(supervisor, rustix::process::Signal::CONT);
            signal(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        "many keys" => repeat(count.max(MANY_KEYS), |number| {
            put(&link, &format!("item/{number}"), &[7; 1024], &[]);
        }),
        ENDS_LINK => {
            let sockets = [&brokers[0], &brokers[1], &link];
            for socket in sockets {
                // An empty packet looks like the end of the connection.
                rustix::net::send(socket, &[], rustix::net::SendFlags::NOSIGNAL).expect("a packet");
            }
            // The loop ends when sending fails, because the supervisor has closed its end of the
            // socket.
            for socket in sockets {
                while send_bytes(socket, b'?', &[], &[], false).is_ok() {}
            }
            repeat(0, |_| std::thread::park());
        }
        "checkpoint with descriptors" => {
            let (read, _write) = io::pipe().expect("a pipe");
            let mut fds = &[read.as_fd(); protocol::MAX_FDS][..];
            if count < CAMPAIGN {
                // Fewer descriptors are sent, because the kernel limits the queued descriptors of
                // each user, and other tests need some.
                fds = &fds[..16];
                set_socket_send_buffer_size(&link, 64 << 10).expect("a socket");
            }
            repeat(count, |number| put(&link, &key(number), &[7; 4096], fds));
        }
        "CHECKPOINT" => repeat(count, |number| put(&link, &key(number), &[7; 4096], &[])),
        "UPGRADE" => {
            // The answers to the requests cannot be sent, because their socket is full: the
            // requester never reads.
            let (_ours, theirs) = protocol::pair().expect("a pair");
            while send_bytes(&theirs, b'n', &[0; 1024], &[], true).is_ok() {}
            let fds = [theirs.as_fd()];
            repeat(count, |_| give(&link, to_supervisor::UPGRADE, b"", &fds));
        }
        name => {
            let code = MESSAGES.iter().find(|(other, _)| *other == name).expect("an attack").1;
            let kinds = descriptors();
            let body = directory().join("secret").into_os_string().into_encoded_bytes();
            repeat(count, |number| {
                let fds = [kinds[number / 16 % kinds.len()].as_fd()];
                give(&link, code, &body, if number % 16 == 0 { &fds } else { &[] });
            });
        }
    }
    listener.join().expect("a thread");
}

/// Executes `step` `count` times, prints "flooding", and then continues to execute it until the
/// shutdown begins.
fn repeat(count: usize, mut step: impl FnMut(usize)) {
    (0..count).for_each(&mut step);
    tell("flooding");
    (count..).take_while(|_| !END.load(Ordering::Acquire)).for_each(step);
}

fn give(socket: &OwnedFd, code: u8, body: &[u8], fds: &[BorrowedFd<'_>]) {
    // Errors are ignored, because the supervisor closes the socket at its shutdown.
    let _ = send_bytes(socket, code, body, fds, false);
}

/// Descriptors of different types: files, a directory, a device, sockets, a pipe and others.
fn descriptors() -> Vec<OwnedFd> {
    let secret = directory().join("secret");
    let (pipe, _write) = io::pipe().expect("a pipe");
    let (stream, _other) = UnixStream::pair().expect("a pair");
    let open = |path: &Path| File::open(path).expect("a file").into();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
    let memory = shadowbell_supervisor::checkpoint::memory_of(b"memory").expect("a memfd");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    vec![
        open(&secret),
        name_of(&secret),
        name_of(Path::new("/etc/shadow")),
        open(Path::new("/")),
        open(Path::new("/dev/null")),
        open(Path::new("/proc/self/mem")),
        event.expect("an eventfd"),
        epoll.expect("an epoll instance"),
        memory,
        pipe.into(),
        stream.into(),
        listener.into(),
    ]
}

/// Opens a file without access to its content.
fn name_of(path: &Path) -> OwnedFd {
    use rustix::fs::{Mode, OFlags, open};
    open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("the file")
}

/// Returns one of 50 keys of checkpoint items.
fn key(number: usize) -> String {
    format!("item/{}", number % 50)
}

/// Stores an item in the checkpoint.
fn put(link: &OwnedFd, key: &str, body: &[u8], fds: &[BorrowedFd<'_>]) {
    let changes = [Change::Put { key, body, fds }];
    let mut memory = Vec::new();
    for packet in packets(&changes, &mut memory).expect("packets") {
        give(link, to_supervisor::CHECKPOINT, &packet.bytes, &packet.fds);
    }
}

/// Fills the checkpoint with this number of items.
fn fill_checkpoint(link: &OwnedFd, items: usize) {
    put(link, shadowbell_supervisor::checkpoint::COMPLETE, &[], &[]);
    (0..items).for_each(|number| put(link, &format!("large/{number}"), &[7; 4096], &[]));
}

/// Sends a transaction of two packets without changes. Returns false if the socket is full.
fn transaction(link: &OwnedFd) -> bool {
    // The first packet begins the transaction, and the second one ends it.
    let send = |flags| send_bytes(link, to_supervisor::CHECKPOINT, &[flags], &[], true).is_ok();
    send(1) && send(2)
}

/// Socket whose close blocks (SO_LINGER), because the peer does not read.
fn slow_to_close() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    set_socket_recv_buffer_size(&listener, 4096).expect("a socket");
    let address = listener.local_addr().expect("an address");
    let mut writer = TcpStream::connect(address).expect("a connection");
    let (reader, _) = listener.accept().expect("a connection");
    set_socket_send_buffer_size(&writer, 4096).expect("a socket");
    writer.set_nonblocking(true).expect("a socket");
    while writer.write(&[0; 65536]).is_ok() {}
    writer.set_nonblocking(false).expect("a socket");
    // With this linger time, a close would block for longer than any limit of the test.
    set_socket_linger(&writer, Some(LIMIT * 100)).expect("a socket");
    (writer.into(), reader)
}

/// Requests images for which the server process has no permission, and reports every image that was
/// opened nevertheless.
fn ask_for_images(broker: &OwnedFd, number: usize) {
    let at = |name: &str| directory().join(name).into_os_string().into_encoded_bytes();
    let secret = File::open(directory().join("secret")).expect("the secret");
    let named = name_of(&directory().join("secret"));
    let requests: [(u8, Vec<u8>, Option<BorrowedFd<'_>>); 9] = [
        (images::NAME, at("secret"), None),
        (images::NAME, at("image/../secret"), None),
        (images::NAME, b"/etc/shadow".into(), None),
        (images::NAME, b"/proc/self/fd/0".into(), None),
        (images::OPEN, b"w".into(), Some(secret.as_fd())),
        (images::OPEN, b"r".into(), Some(named.as_fd())),
        (images::IDENTIFY, b"r".into(), Some(named.as_fd())),
        (number as u8, at("secret"), Some(named.as_fd())),
        (images::CONNECT, Vec::new(), None),
    ];
    let (code, body, fd) = &requests[number % requests.len()];
    if number as u8 == images::NAME && number % requests.len() == 7 {
        return;
    }
    give(broker, *code, body, fd.as_slice());
    let Ok(Some(answer)) = protocol::receive(broker, false) else { return };
    if *code == images::CONNECT {
        // The answer to this request is another connection to the broker. This is permitted. It
        // stays open and unused.
        return answer.fds.into_iter().for_each(std::mem::forget);
    }
    for fd in answer.fds {
        let mut text = String::new();
        let read = File::from(fd).read_to_string(&mut text);
        tell(&format!("breach: {code} {body:?} was opened: {read:?} {text}"));
    }
}

/// Requests sockets and files for which the server process has no permission.
fn ask_for_paths(broker: &OwnedFd, number: usize) {
    let root = directory();
    let names = ["other.sock", "stale.sock", "sockets/other.sock", "sockets/stale.sock", "secret"];
    let path = root.join(names[number % names.len()]);
    let about = path.symlink_metadata().expect("the file is there");
    let made = Made { path: bytes_of(&path), file: Some((about.dev(), about.ino())) };
    let made = serde_json::to_vec(&made).expect("a text");
    let listen = |kind: Kind| serde_json::to_vec(&(kind, bytes_of(&path))).expect("a text");
    let empty = root.join("empty");
    let (code, body) = match number / names.len() % 9 {
        0 => (paths::LISTEN, listen(Kind::Controller)),
        1 => (paths::LISTEN, listen(Kind::Private)),
        2 => (paths::LISTEN, listen(Kind::Plain)),
        3 => (paths::REMOVE, made),
        4 => (paths::REMOVE_DIRECTORY, empty.as_os_str().as_bytes().to_vec()),
        5 => (paths::TRACE, paths::KEEP.into()),
        6 => (paths::TCP, b"127.0.0.1:1".into()),
        7 => (paths::PAIR, Vec::new()),
        _ => (b'p', b"{\"directories\":[[47]]}".into()),
    };
    give(broker, code, &body, &[]);
    let Ok(Some(answer)) = protocol::receive(broker, false) else { return };
    if !answer.fds.is_empty() && code != paths::PAIR {
        tell(&format!("breach: {code} {} was granted", path.display()));
    }
}
