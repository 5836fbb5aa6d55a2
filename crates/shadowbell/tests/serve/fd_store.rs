//! Recovery after the death of the supervisor, from descriptors in the service manager's FD
//! store: a stand-in for systemd stores descriptors and passes them to the next process.

use crate::harness::{image, until};
use crate::supervisor::{children, has_ended, signal};
use crate::upgrade::{Client, Load};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::Signal;
use shadowbell_testing::process_group::ProcessGroup;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// Environment variable with the number of stored descriptors. If it is set, this test program
/// passes them to a service, which it executes.
const PASS: &str = "SHADOWBELL_TEST_PASS";
/// First temporary number of descriptors that are passed to a child. It is larger than any number
/// in use.
const FIRST_IN_TRANSIT: i32 = 50;

/// State of the simulated service manager: the stored descriptors with their names, in order of
/// arrival, and true if the service is ready.
#[derive(Default)]
struct FdStore {
    fds: Vec<(String, OwnedFd)>,
    is_ready: bool,
    /// Number of messages that the manager has sent to its own socket and received. If a message of
    /// its own has arrived, all earlier messages of the service have arrived, too.
    own: u32,
}

/// Receives the service's messages, as systemd does.
fn listen(socket: &UnixDatagram, stored: &Mutex<FdStore>) {
    loop {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let Ok(heard) = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) else {
            return;
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                fds.extend(some);
            }
        }
        let text = String::from_utf8_lossy(&bytes[..heard.bytes]).into_owned();
        let has = |line: &str| text.lines().any(|other| other == line);
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default();
        let mut stored = stored.lock().unwrap();
        stored.is_ready |= has("READY=1");
        stored.own += u32::from(has("OWN"));
        if has("FDSTORE=1") {
            assert!(has("FDPOLL=0") && !name.is_empty() && !name.contains(':'), "{text}");
            stored.fds.extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
        } else if has("FDSTOREREMOVE=1") {
            stored.fds.retain(|(other, _)| other != name);
        } else {
            assert!(fds.is_empty(), "{text}");
        }
        if has("END") {
            return;
        }
    }
}

/// A running service, and its service manager.
struct Service {
    directory: TempDir,
    stored: Arc<Mutex<FdStore>>,
    child: ProcessGroup,
    /// Killed supervisors. Their server processes may continue to serve until the end of the test.
    dead: Vec<ProcessGroup>,
}

impl Service {
    /// Starts a service with `controllers` controllers, each with a file and a memory disk.
    fn start(controllers: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut file = String::from("workers = 2\n");
        for n in 0..controllers {
            image(directory.path(), &format!("{n}.img"), 16 << 20);
            file += &format!(
                "[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"{n}.img\", \"mem:16MiB\"]\n"
            );
        }
        std::fs::write(directory.path().join("vms.toml"), file).unwrap();
        let stored = Arc::<Mutex<FdStore>>::default();
        let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        let its = Arc::clone(&stored);
        std::thread::spawn(move || listen(&socket, &its));
        let child = Self::spawn(&directory, &stored);
        let service = Self { directory, stored, child, dead: Vec::new() };
        service.wait_ready();
        service
    }

    fn spawn(directory: &TempDir, stored: &Mutex<FdStore>) -> ProcessGroup {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let mut stored = stored.lock().unwrap();
        stored.is_ready = false;
        let names: Vec<_> = stored.fds.iter().map(|(name, _)| name.as_str()).collect();
        let names = names.join(":");
        for (_, fd) in &stored.fds {
            let fds = [fd.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&ours, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        }
        let log = std::fs::File::options()
            .append(true)
            .create(true)
            .open(directory.path().join("log"))
            .unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "fd_store::pass_descriptors_on", "--nocapture"]);
        command.env(PASS, stored.fds.len().to_string());
        command.env("NOTIFY_SOCKET", directory.path().join("notify")).env("FDSTORE", "16");
        command.env("LISTEN_FDS", stored.fds.len().to_string()).env("LISTEN_FDNAMES", names);
        command.env("SHADOWBELL_RUN_DIR", directory.path().join("run")).env_remove("RUST_LOG");
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(log);
        ProcessGroup::spawn(command.current_dir(directory.path())).unwrap()
    }

    /// Restarts the service, as `Restart=` does.
    ///
    /// As systemd does, this function receives the messages of the killed supervisor before it
    /// starts the next process.
    fn restart(&mut self) {
        let before = self.stored.lock().unwrap().own;
        let own = UnixDatagram::unbound().unwrap();
        own.send_to(b"OWN", self.directory.path().join("notify")).unwrap();
        until("all messages are received", || self.stored.lock().unwrap().own > before);
        let child = Self::spawn(&self.directory, &self.stored);
        self.dead.push(std::mem::replace(&mut self.child, child));
    }

    fn is_ready(&self) -> bool {
        self.stored.lock().unwrap().is_ready
    }

    #[track_caller]
    fn wait_ready(&self) {
        until("READY=1", || self.is_ready());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn socket(&self, controller: usize) -> PathBuf {
        self.directory.path().join(format!("vm{controller}.sock"))
    }

    fn stored(&self) -> Vec<String> {
        self.stored.lock().unwrap().fds.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Kills the supervisor, and if `all` is true also its server processes. Returns the ids of the
    /// server processes.
    fn kill(&mut self, all: bool) -> Vec<u32> {
        let workers = children(self.pid());
        signal(self.pid(), Signal::KILL);
        if all {
            for worker in &workers {
                if !has_ended(*worker) {
                    signal(*worker, Signal::KILL);
                }
            }
        }
        self.child.wait();
        workers
    }

    fn stop(&mut self) -> ExitStatus {
        signal(self.pid(), Signal::TERM);
        self.child.wait()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.child.kill();
        self.dead.clear();
        let ended = UnixDatagram::unbound().unwrap();
        let _ = ended.send_to(b"END", self.directory.path().join("notify"));
        if std::thread::panicking() {
            eprintln!("log of the service:\n{}", self.log());
        }
    }
}

/// Entry point of a child process; not a test of its own. It places the stored descriptors at the
/// numbers from 3 on, and executes the program.
#[test]
fn pass_descriptors_on() {
    let Ok(count) = std::env::var(PASS) else { return };
    let count: i32 = count.parse().unwrap();
    let link = std::io::stdin();
    let mut script = String::new();
    for nth in 0..count {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut parts = [IoSliceMut::new(&mut byte)];
        recvmsg(link.as_fd(), &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(mut fds) = message else { continue };
            let on_the_way = fcntl_dupfd_cloexec(fds.next().unwrap(), FIRST_IN_TRANSIT).unwrap();
            fcntl_setfd(&on_the_way, FdFlags::empty()).unwrap();
            let (at, to) = (on_the_way.as_raw_fd(), 3 + nth);
            script += &format!("exec {to}<&{at} {at}<&-; ");
            std::mem::forget(on_the_way);
        }
    }
    script += "export LISTEN_PID=$$; exec \"$@\" </dev/null";
    let mut command = Command::new("bash");
    command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_shadowbell")]);
    command.args(["serve", "--supervisor", "--config", "vms.toml"]).env_remove(PASS);
    panic!("{}", command.exec());
}

#[test]
fn a_killed_supervisor_recovers_from_the_fd_store() {
    let mut service = Service::start(3);
    assert_eq!(service.stored(), ["shadowbell-supervisor-1-w", "shadowbell-supervisor-1-r"]);
    let mut client = Client::attach(&service.socket(2));
    client.write(1, 0, 1);
    client.write(2, 0, 2);
    let loads = [(0, 1), (1, 2)].map(|(n, nsid)| Load::at(&service.socket(n), nsid));
    until("the loads' clients", || service.log().matches("a client is attached").count() >= 3);
    for n in 0..20_u8 {
        // The time before a kill is arbitrary, but long enough that the kills are not a crash loop.
        std::thread::sleep(Duration::from_millis(60 + u64::from(n)));
        let workers = service.kill(n % 2 == 0);
        service.restart();
        service.wait_ready();
        assert!(workers.iter().all(|pid| has_ended(*pid)), "two processes serve");
        assert_eq!((client.read(1, 0), client.read(2, 0)), (n + 1, n + 2));
        client.write(1, 0, n + 2);
        client.write(2, 0, n + 3);
        until("the rest is forgotten", || service.stored().len() == 2);
    }
    loads.into_iter().for_each(Load::assert_no_loss);
    let log = service.log();
    assert!(!log.contains("have lost") && !log.contains("cannot store"), "{log}");
    assert_eq!(log.matches("error: the supervisor was killed; this one continues").count(), 20);
    drop(client);
    // A service that ends in good order leaves no descriptor in the store.
    assert!(service.stop().success(), "{}", service.log());
    until("an empty FD store", || service.stored().is_empty());
    assert!((0..3).all(|n| !service.socket(n).exists()));
    service.restart();
    service.wait_ready();
    assert_eq!(service.log().matches("the supervisor was killed").count(), 20);
    Client::attach(&service.socket(0)).write(1, 0, 1);
}

/// The supervisor is killed during a recovery, during an upgrade, during its exec of another
/// program, and while messages of the server process are unread.
#[test]
fn a_supervisor_may_be_killed_at_any_moment() {
    let mut service = Service::start(3);
    let mut client = Client::attach(&service.socket(0));
    client.write(1, 0, 0);
    let load = Load::at(&service.socket(1), 1);
    until("the load's client", || service.log().matches("a client is attached").count() >= 2);
    let mut others: Vec<(Client, u8)> = Vec::new();
    for n in 0..40_u64 {
        service.wait_ready();
        others.drain(..).for_each(|(mut other, byte)| assert_eq!(other.read(1, 0), byte));
        // The process serves for a while, so that its death is not part of a crash loop.
        std::thread::sleep(Duration::from_millis(60));
        match n % 4 {
            // SIGUSR2 starts an upgrade: a new server process, and then an exec of the supervisor.
            0 | 1 => {
                signal(service.pid(), Signal::USR2);
                // The kill comes at an arbitrary moment of the upgrade.
                std::thread::sleep(Duration::from_millis(n * 2));
            }
            // The stopped supervisor does not read. So the server process's messages about this
            // client are unread when the supervisor is killed.
            2 => {
                signal(service.pid(), Signal::STOP);
                let mut other = Client::attach(&service.socket(2));
                other.write(1, 0, n as u8);
                others.push((other, n as u8));
            }
            _ => {}
        }
        service.kill(n % 3 == 0);
        service.restart();
        // In every second round, the supervisor is killed a second time, while it recovers. If this
        // happened in every round, the kills would count as a crash loop.
        if n % 2 == 1 {
            // The kill comes at an arbitrary moment before the service is ready.
            std::thread::sleep(Duration::from_millis(n / 2));
            if !service.is_ready() {
                service.kill(n % 3 == 1);
                service.restart();
            }
        }
        service.wait_ready();
        assert_eq!(client.read(1, 0), n as u8);
        client.write(1, 0, n as u8 + 1);
    }
    load.assert_no_loss();
    let log = service.log();
    assert!(!log.contains("have lost") && !log.contains("cannot store"), "{log}");
}

#[test]
fn unusable_state_in_the_fd_store_is_removed() {
    let mut service = Service::start(1);
    let mut client = Client::attach(&service.socket(0));
    client.write(1, 0, 1);
    service.kill(true);
    // Replaces the snapshot in the FD store by one of another release.
    {
        let stored = service.stored.lock().unwrap();
        let (name, write) = &stored.fds[0];
        assert!(name.ends_with("-w"));
        let mut bytes = b"D".to_vec();
        bytes.extend((1_u64 << 40).to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        let memory = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let fds = [memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(write, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    }
    service.restart();
    service.wait_ready();
    assert!(service.log().contains("is unusable: "), "{}", service.log());
    drop(client);
    until("its socket", || UnixStream::connect(service.socket(0)).is_ok());
    Client::attach(&service.socket(0)).write(1, 0, 1);
    assert!(service.stop().success());
    until("an empty FD store", || service.stored().is_empty());
}
