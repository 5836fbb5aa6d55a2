//! Tests of live migration: a guest that executes I/O moves from one server to another.

use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_disk::Disk;
use shadowbell_frontend::ControllerDevice;
use shadowbell_memory::Mapping;
use shadowbell_spec::admin::Identify;
use shadowbell_spec::{Sqe, regs};
use shadowbell_testing::guest::{Guest, MEMORY};
use shadowbell_testing::wait;
use shadowbell_vfio_user::client::{ClientError, DmaRange, Options};
use shadowbell_vfio_user::device::{Completer, Device, region};
use shadowbell_vfio_user::migration::MigrationState;
use shadowbell_vfio_user::server::RunEnd;
use shadowbell_vfio_user::{Client, Errno, Listener, Reactor};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Controller behind a socket.
struct Server {
    directory: tempfile::TempDir,
    handle: shadowbell_vfio_user::server::Handle,
    running: Option<JoinHandle<RunEnd>>,
}

impl Server {
    fn start(disk: &Arc<dyn Disk>, workers: usize) -> Self {
        Self::with(disk, workers, |_| ())
    }

    fn with(disk: &Arc<dyn Disk>, workers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let namespaces = vec![NamespaceConfig { uuid: uuid_from("moved"), disk: Arc::clone(disk) }];
        let mut config = Config { namespaces, serial: "MOVED".into(), ..Config::default() };
        change(&mut config);
        let pool = Pool::start(&PoolOptions { workers, ..PoolOptions::default() }).unwrap();
        let controller = Controller::new(config, pool, Carrier::default()).unwrap();
        let device = ControllerDevice::new(controller, Arc::new(|_| ())).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut reactor = Reactor::new(Default::default()).unwrap();
        let listener = Listener::bind(directory.path().join("cntrl")).unwrap();
        reactor.add(listener, Box::new(device)).unwrap();
        let handle = reactor.handle();
        let running = Some(std::thread::spawn(move || reactor.run().unwrap()));
        Self { directory, handle, running }
    }

    fn connect(&self) -> Client {
        Client::connect(self.directory.path(), Options::default()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.handle.stop();
        let _ = self.running.take().map(JoinHandle::join);
    }
}

fn disk() -> Arc<dyn Disk> {
    Arc::new(shadowbell_disk_file::MemDisk::new(1024, 512).unwrap())
}

/// Creates a file-backed disk, whose requests are asynchronous.
fn file(directory: &tempfile::TempDir) -> Arc<dyn Disk> {
    let path = directory.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    shadowbell_disk_file::open(path.to_str().unwrap()).unwrap()
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> Errno {
    match outcome {
        Err(ClientError::Refused { errno, .. }) => errno,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_working_guest_migrates_repeatedly() {
    let directory = tempfile::tempdir().unwrap();
    for (disk, shadow) in [(disk(), false), (disk(), true), (file(&directory), true)] {
        let servers = [Server::start(&disk, 2), Server::start(&disk, 1)];
        let mut guest = Guest::boot(servers[0].connect(), 3, shadow);
        guest.work(50);
        for turn in 1..5 {
            let (memory, stream, moved) = guest.suspend(3);
            assert!(moved.dirty > 0 && moved.stream > 1000, "{moved:?}");
            let server = &servers[turn % 2];
            guest.resume(server.connect(), memory, &stream).unwrap();
            guest.drain();
            let raised = guest.interrupts();
            assert!(raised.iter().all(|count| *count > 0), "{raised:?}");
            guest.work(50);
            guest.verify();
        }
        assert!(guest.completed() > 500, "{}", guest.completed());
    }
}

#[test]
fn a_suspended_guest_resumes_at_the_source() {
    let server = Server::start(&disk(), 1);
    let mut guest = Guest::boot(server.connect(), 2, true);
    for _ in 0..3 {
        guest.work(20);
        let (_, _, moved) = guest.suspend(1);
        assert!(moved.in_flight > 0, "{moved:?}");
        guest.resume_at_source();
        guest.verify();
    }
}

#[test]
fn a_suspended_device_serves_the_next_client() {
    let (disk, other) = (disk(), disk());
    let server = Server::start(&disk, 1);
    for turn in 0..3 {
        let mut guest = Guest::boot(server.connect(), 2, turn != 1);
        guest.work(10);
        let (memory, stream, _) = guest.suspend(1);
        if turn == 2 {
            // The stopped device is reset and enabled again.
            guest.client().reset().unwrap();
            assert_eq!(guest.client().migration_state().unwrap(), MigrationState::Running);
            assert!(!guest.is_ready());
        }
        // The guest runs at the target, to which its memory has moved. So the source must not
        // execute the guest's commands any more.
        drop(guest);
        let target = Server::start(&disk, 1);
        let mut next = Guest::boot(server.connect(), 1, false);
        next.work(3);
        next.verify();
        drop(next);
        drop((target, memory, stream));
    }
    drop(other);
}

#[test]
fn operations_invalid_in_a_migration_state_are_refused() {
    let server = Server::start(&disk(), 1);
    let mut guest = Guest::boot(server.connect(), 1, false);
    let client = guest.client();
    assert_eq!(client.migration_flags().unwrap(), 1);
    assert!(client.read_migration_stream().is_err_and(|e| refused::<()>(Err(e)) == Errno::INVAL));
    assert_eq!(refused(client.write_migration_stream(&[1])), Errno::INVAL);
    assert_eq!(refused(client.set_migration_state(MigrationState::Error)), Errno::INVAL);
    assert_eq!(refused(client.dirty_pages(0, 4096, 4096)), Errno::INVAL);
    assert_eq!(refused(client.stop_dma_logging()), Errno::INVAL);
    client.start_dma_logging(&[]).unwrap();
    assert_eq!(refused(client.start_dma_logging(&[])), Errno::BUSY);
    for (iova, len, unit) in [(0, 0, 4096), (0, 4096, 0), (0, 4096, 3), (u64::MAX, 2, 1)] {
        assert_eq!(refused(client.dirty_pages(iova, len, unit)), Errno::INVAL);
    }
    assert_eq!(refused(client.dirty_pages(0, 1 << 62, 1)), Errno::TOOBIG);
    client.stop_dma_logging().unwrap();
    for state in [MigrationState::Stop, MigrationState::StopCopy, MigrationState::Resuming] {
        client.set_migration_state(state).unwrap();
        assert_eq!(client.migration_state().unwrap(), state);
        let write = client.region_write(region::BAR0, regs::AQA, &[0; 4]);
        assert_eq!(refused(write), Errno::BUSY);
        // The guest writes Initiate Function Level Reset.
        let reset = client.region_write(region::CONFIG, 0x68, &0x8000_u16.to_le_bytes());
        assert_eq!(refused(reset), Errno::BUSY);
    }
    // An empty stream is not a valid state. After it, only a reset makes the device usable again.
    assert_eq!(refused(client.set_migration_state(MigrationState::Running)), Errno::INVAL);
    assert_eq!(client.migration_state().unwrap(), MigrationState::Error);
    assert_eq!(refused(client.set_migration_state(MigrationState::Stop)), Errno::INVAL);
    client.reset().unwrap();
    assert_eq!(client.migration_state().unwrap(), MigrationState::Running);
    drop(guest);
    guest = Guest::boot(server.connect(), 2, true);
    guest.work(5);
    guest.verify();
}

#[test]
fn a_state_of_another_controller_is_refused() {
    let disk = disk();
    let home = Server::start(&disk, 1);
    let mut guest = Guest::boot(home.connect(), 2, true);
    guest.work(10);
    let others: [fn(&mut Config); 3] = [
        |config| config.serial = "OTHER".into(),
        |config| config.io_queues = 1,
        |config| config.namespaces[0].uuid = [1; 16],
    ];
    let (memory, stream, _) = guest.suspend(1);
    for change in others {
        let other = Server::with(&disk, 1, change);
        let client = other.connect();
        client.set_migration_state(MigrationState::Resuming).unwrap();
        client.write_migration_stream(&stream).unwrap();
        assert_eq!(refused(client.set_migration_state(MigrationState::Stop)), Errno::INVAL);
    }
    drop(memory);
    guest.resume_at_source();
    guest.verify();
}

/// Replaces each number, list and text of a migration state, one after the other. The server
/// refuses a corrupted state, or the state affects only the controller of the client that sent it.
#[test]
fn corrupt_migration_states_do_no_harm() {
    let disk = disk();
    let home = Server::start(&disk, 1);
    let mut guest = Guest::boot(home.connect(), 2, true);
    guest.work(10);
    let (_, stream, _) = guest.suspend(0);
    let (head, body) = stream.split_at(24);
    let state: serde_json::Value = serde_json::from_slice(body).unwrap();
    let mut places = Vec::new();
    walk(&state, String::new(), &mut places);
    assert!(places.len() > 100, "{}", places.len());
    let there = Server::start(&disk, 1);
    let values = [0_u64, 1, 2, 31, 32, 255, 4095, 65535, 1 << 31, u32::MAX.into(), u64::MAX];
    let mut values: Vec<serde_json::Value> = values.iter().map(|n| (*n).into()).collect();
    values.extend([
        serde_json::Value::Null,
        true.into(),
        false.into(),
        "AAAA".into(),
        serde_json::json!([]),
        vec![0; 300].into(),
    ]);
    let client = there.connect();
    share(&client, &Mapping::shared("a guest", MEMORY).unwrap());
    let (mut taken, mut refusals) = (0, 0);
    for (n, place) in places.iter().enumerate() {
        // Testing all values at each place would take too long. So each place is tested with a
        // third of the values, and the next place with another third.
        for value in values.iter().skip(n % 3).step_by(3) {
            let mut state = state.clone();
            *state.pointer_mut(place).unwrap() = value.clone();
            let body = serde_json::to_vec(&state).unwrap();
            let mut head = head.to_vec();
            head[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
            client.set_migration_state(MigrationState::Resuming).unwrap();
            client.write_migration_stream(&head).unwrap();
            client.write_migration_stream(&body).unwrap();
            match client.set_migration_state(MigrationState::Running) {
                Ok(()) => taken += 1,
                Err(ClientError::Refused { .. }) => refusals += 1,
                Err(error) => panic!("{place} is {value}: {error}"),
            }
            client.reset().unwrap();
        }
    }
    assert!(taken > 50 && refusals > 100, "{taken} taken, {refusals} refused");
    drop(client);
    // The server still serves a guest.
    let mut guest = Guest::boot(there.connect(), 2, false);
    guest.work(10);
    guest.verify();
}

/// Shares memory from address 0 on.
fn share(client: &Client, memory: &Mapping) {
    let (len, fd) = (memory.len() as u64, memory.fd());
    let share = DmaRange { iova: 0, len, readable: true, writable: true, fd, fd_offset: 0 };
    client.dma_map(&share).unwrap();
}

/// Lists the places at which two states differ, because the states are too long to print.
///
/// The test restores a migration stream that the first release with migration has saved, and the
/// server must save the same state again. `SHADOWBELL_CAPTURE=PATH` saves a stream to a file: add
/// one for each release whose streams must stay readable.
fn differences(at: &str, a: &serde_json::Value, b: &serde_json::Value) -> Vec<String> {
    use serde_json::Value::{Array, Null, Object};
    match (a, b) {
        _ if a == b => Vec::new(),
        (Object(a), Object(b)) => {
            let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
            let of = |map: &serde_json::Map<_, _>, key: &str| map.get(key).cloned().unwrap_or(Null);
            let places =
                keys.into_iter().map(|key| (format!("{at}/{key}"), of(a, key), of(b, key)));
            places.flat_map(|(at, a, b)| differences(&at, &a, &b)).collect()
        }
        (Array(a), Array(b)) if a.len() == b.len() => {
            let pairs = a.iter().zip(b).enumerate();
            pairs.flat_map(|(n, (a, b))| differences(&format!("{at}/{n}"), a, b)).collect()
        }
        _ => vec![at.to_owned()],
    }
}

#[test]
fn a_stream_of_another_release_is_restored() {
    const STREAMS: [&[u8]; 1] = [include_bytes!("streams/version-1.bin")];
    let disk = disk();
    if let Some(path) = std::env::var_os("SHADOWBELL_CAPTURE") {
        let server = Server::start(&disk, 1);
        let mut guest = Guest::boot(server.connect(), 2, false);
        guest.work(10);
        guest.drain();
        let (_, stream, _) = guest.suspend(0);
        std::fs::write(path, stream).unwrap();
    }
    for stream in STREAMS {
        let server = Server::start(&disk, 1);
        let client = server.connect();
        let memory = Mapping::shared("a guest", MEMORY).unwrap();
        share(&client, &memory);
        client.set_migration_state(MigrationState::Resuming).unwrap();
        client.write_migration_stream(stream).unwrap();
        client.set_migration_state(MigrationState::StopCopy).unwrap();
        let again = client.read_migration_stream().unwrap();
        let state = |stream: &[u8]| {
            let mut state: serde_json::Value = serde_json::from_slice(&stream[24..]).unwrap();
            // These values depend on time, on the history of this server, or on the addresses of
            // queues.
            for place in [
                "/0/body/controller/control/powered_ms",
                "/0/body/controller/control/features/clock/0",
                "/0/body/controller/control/generation",
                "/0/body/controller/parts/0/worker",
            ] {
                *state.pointer_mut(place).unwrap() = 0.into();
            }
            // A saved state has no `reset_ms` if the value is zero.
            let control = state.pointer_mut("/0/body/controller/control").unwrap();
            control.as_object_mut().unwrap().remove("reset_ms");
            state
        };
        let (before, after) = (state(stream), state(&again));
        assert!(before == after, "{:?}", differences("", &before, &after));
        let admin = &after[0]["body"]["controller"]["admin"];
        let number = |at: &serde_json::Value| at.as_u64().unwrap() as usize;
        let (head, tail) = (number(&admin["sq"]["head"]), number(&admin["cq"]["tail"]));
        // The test continues as the guest: its next admin command is Identify Controller, with a
        // page of its own as buffer.
        let bytes = memory.bytes();
        let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(0x06, 77, 0));
        bytes.write(head * 64, &identify.with_prps(1 << 20, 0)).unwrap();
        client.set_migration_state(MigrationState::Running).unwrap();
        let doorbell = (head as u32 + 1) % 32;
        client.region_write(region::BAR0, regs::DOORBELLS, &doorbell.to_le_bytes()).unwrap();
        let cid = || bytes.read::<u16>(4096 + tail * 16 + 12);
        wait::until("a completion", || cid() == Some(77));
        let mut serial = [0; 5];
        bytes.read_into((1 << 20) + 4, &mut serial).unwrap();
        assert_eq!(&serial, b"MOVED");
    }
}

/// Collects the places of all values in a state.
fn walk(value: &serde_json::Value, at: String, places: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(members) => {
            members.iter().for_each(|(name, value)| walk(value, format!("{at}/{name}"), places));
        }
        serde_json::Value::Array(entries) => {
            let entries = entries.iter().enumerate();
            entries.for_each(|(n, value)| walk(value, format!("{at}/{n}"), places));
        }
        _ => {}
    }
    places.push(at);
}

/// While a migration state is parsed, the reactor serves other clients.
#[test]
fn a_state_is_parsed_on_another_thread() {
    let namespaces = vec![NamespaceConfig { uuid: uuid_from("moved"), disk: disk() }];
    let config = Config { namespaces, ..Config::default() };
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    let mut device = ControllerDevice::new(controller, Arc::new(|_| ())).unwrap();
    let migration = device.migration().unwrap();
    for len in [0, 100, 1 << 20] {
        let (sender, parsed) = std::sync::mpsc::channel();
        let done = Completer::new(move |outcome| {
            sender.send((outcome, std::thread::current().id())).unwrap();
        });
        migration.load_state(vec![0x5a; len], done);
        let (outcome, thread) = parsed.recv_timeout(wait::LIMIT).unwrap();
        assert_eq!(outcome, Ok(()));
        assert_ne!(thread, std::thread::current().id());
        assert_eq!(migration.use_state(), Err(Errno::INVAL), "{len} bytes are no state");
        assert_eq!(migration.use_state(), Err(Errno::INVAL), "it is used once");
    }
    // A client that reconnects while its state is parsed cannot start another parser.
    let lists = vec!["[]"; 300_000].join(",");
    let body = format!(r#"[{{"name":"x","mandatory":false,"body":[{lists}]}}]"#);
    let own = shadowbell_state::Parcel::new().encode(0).unwrap();
    let stream = [&own[..16], &(body.len() as u64).to_le_bytes(), body.as_bytes()].concat();
    let (sender, outcomes) = std::sync::mpsc::channel();
    // Parsing takes longer than a call of `load_state`, so some of the twenty calls find a parser
    // at work, unless this thread is suspended between the calls.
    let all = (0..20).map(|_| {
        let sender = sender.clone();
        migration.load_state(stream.clone(), Completer::new(move |end| sender.send(end).unwrap()));
    });
    let count = all.count();
    let outcomes: Vec<_> =
        (0..count).map(|_| outcomes.recv_timeout(wait::LIMIT).unwrap()).collect();
    assert!(outcomes.contains(&Ok(())) && outcomes.contains(&Err(Errno::BUSY)), "{outcomes:?}");
    assert_eq!(migration.use_state(), Err(Errno::INVAL), "it is no state");
}
