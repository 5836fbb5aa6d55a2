//! Tests with real NBD servers: nbdkit with its filters, and qemu-nbd. If a server is not
//! installed, its tests are skipped with a message.

use shadowbell_disk::{Disk, DiskError, Op, Request};
use shadowbell_disk_nbd::{NbdDisk, NbdSpec};
use shadowbell_memory::Segments;
use shadowbell_testing::certificates::{Authority, CertificatePurpose, CertificateSpec};
use shadowbell_testing::disks::{
    Random, batch, content, flush, memory, read, run, run_one, segments, write,
};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

struct Peer {
    child: ProcessGroup,
    directory: TempDir,
}

impl Peer {
    /// Starts `program` with a socket, and waits until it accepts clients. Returns `None`, with a
    /// message, if the program is not installed.
    fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let child = start(program, arguments, &directory.path().join("nbd"))?;
        Some(Self { child, directory })
    }

    fn open(&self, options: &str) -> NbdDisk {
        open(&self.directory.path().join("nbd"), options)
    }
}

fn open(socket: &Path, options: &str) -> NbdDisk {
    let spec = format!("nbd+unix:///?socket={}{options}", socket.display());
    NbdDisk::open(&NbdSpec::parse(&spec).unwrap()).unwrap()
}

fn start(program: &str, arguments: &[&str], socket: &Path) -> Option<ProcessGroup> {
    let path = socket.to_str().unwrap();
    // A killed server leaves its socket file, which is removed here.
    let _ = std::fs::remove_file(socket);
    let mut command = Command::new(program);
    if program == "nbdkit" {
        command.args(["--foreground", "--exit-with-parent", "--unix", path]);
    } else {
        command.args(["--persistent", "--socket", path]);
    }
    command.args(arguments).stderr(Stdio::piped()).stdout(Stdio::null());
    let mut child = match ProcessGroup::spawn(&mut command) {
        Ok(child) => child,
        Err(error) => {
            skipped(format_args!(
                "`{program}` is not here ({error}); Debian has it in nbdkit, qemu-utils"
            ));
            return None;
        }
    };
    // The servers report no readiness, so the test tries to connect.
    wait::until(&format!("a socket of {program}"), || {
        if let Ok(Some(status)) = child.try_wait() {
            let mut text = String::new();
            let _ = child.stderr.take().unwrap().read_to_string(&mut text);
            panic!("{program} {arguments:?}: {status}: {text}");
        }
        UnixStream::connect(socket).is_ok()
    });
    Some(child)
}

fn model(disk: &NbdDisk, seed: u64, rounds: usize) {
    let mut model = content(disk);
    let mut random = Random(seed);
    let mut queues = [disk.queue().unwrap(), disk.queue().unwrap()];
    for _ in 0..rounds {
        let queue = &mut queues[random.below(2) as usize];
        batch(disk, &mut **queue, &mut model, &mut random);
    }
    assert_eq!(flush(&mut *queues[0]), Ok(()));
    assert!(content(disk) == model);
}

#[test]
fn nbdkit_with_memory() {
    let Some(peer) = Peer::start("nbdkit", &["memory", "2M"]) else { return };
    let disk = peer.open("");
    assert!(disk.describe().starts_with("NBD with 4 connections"), "{}", disk.describe());
    model(&disk, 5, 20);
}

#[test]
fn nbdkit_with_few_features() {
    let filters = ["--filter=nozero", "--filter=multi-conn"];
    let parameters = ["memory", "2M", "zeromode=none", "multi-conn-mode=disable"];
    let Some(peer) = Peer::start("nbdkit", &[&filters[..], &parameters].concat()) else { return };
    let disk = peer.open("");
    assert!(disk.describe().starts_with("NBD with one connection"), "{}", disk.describe());
    assert!(!disk.info().discard);
    model(&disk, 6, 20);
}

/// The server delays each reply, so that replies may arrive in any order.
#[test]
fn nbdkit_with_delays() {
    let parameters = ["--filter=delay", "memory", "2M", "rdelay=3ms", "wdelay=2ms"];
    let Some(peer) = Peer::start("nbdkit", &parameters) else { return };
    model(&peer.open(""), 7, 6);
}

/// Each request fails with a probability of one half.
#[test]
fn nbdkit_with_errors() {
    let parameters = ["--filter=error", "memory", "2M", "error=EIO", "error-rate=50%"];
    let Some(peer) = Peer::start("nbdkit", &parameters) else { return };
    let disk = peer.open("");
    let mut queue = disk.queue().unwrap();
    let bytes = memory(MIB);
    let requests = (0..256_u64).map(|at| {
        let op = if at % 2 == 0 { Op::Read } else { Op::Write { fua: false } };
        (Request { op, offset: at * 4096, len: 4096 }, segments(&bytes, at as usize * 4096, 4096))
    });
    let results = run(&mut *queue, requests.collect());
    let failed = results.iter().filter(|result| **result == Err(DiskError::Io(5))).count();
    let done = results.iter().filter(|result| result.is_ok()).count();
    assert!(failed > 0 && done > 0 && failed + done == 256, "{failed} failed, {done} did not");
    assert_eq!(disk.counters()[1], ("connections_lost", 0));
}

/// Reads from a server that kills itself at about every eighth read, and is started again each
/// time.
#[test]
fn requests_survive_repeated_crashes_of_nbdkit() {
    let script = r#"
        case "$1" in
            get_size) echo 1048576 ;;
            pread) if [ $((RANDOM % 8)) = 0 ]; then kill -9 $PPID; fi
                   dd if="$IMAGE" iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none ;;
            *) exit 2 ;;
        esac
    "#;
    let directory = tempfile::tempdir().unwrap();
    let (image, program) = (directory.path().join("image"), directory.path().join("script"));
    std::fs::write(&image, Random(3).bytes(MIB)).unwrap();
    std::fs::write(&program, format!("#!/bin/bash\nIMAGE={}\n{script}", image.display())).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let socket = directory.path().join("nbd");
    let arguments = ["sh", program.to_str().unwrap()];
    let Some(mut child) = start("nbdkit", &arguments, &socket) else { return };
    let disk = open(&socket, "&connections=2");
    let expected = std::fs::read(&image).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut queue = disk.queue().unwrap();
            for at in 0..60 {
                let at = at * 16384;
                assert!(read(&mut *queue, at, 16384).unwrap() == expected[at as usize..][..16384]);
            }
            over.store(true, std::sync::atomic::Ordering::Release);
        });
        // Restarts the server whenever it has ended, as systemd would.
        while !over.load(std::sync::atomic::Ordering::Acquire) && !reader.is_finished() {
            match child.try_wait().unwrap() {
                Some(_) => child = start("nbdkit", &arguments, &socket).unwrap(),
                None => std::thread::yield_now(),
            }
        }
        reader.join().unwrap();
    });
    drop(child);
    assert!(disk.counters()[1].1 > 0);
}

/// The server is qemu-nbd with a qcow2 image and a cache, and is killed during the test.
#[test]
fn qemu_nbd_killed_and_restarted() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("a.qcow2"), directory.path().join("nbd"));
    let name = image.to_str().unwrap();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", name, "2M"]).status();
    if !made.is_ok_and(|status| status.success()) {
        skipped("`qemu-img` is not here; it is in Debian's qemu-utils");
        return;
    }
    // With this cache mode, writes remain in the server's memory, and the metadata of the image may
    // remain there until the server ends.
    let arguments = ["--format=qcow2", "--shared=8", "--cache=writeback", "--discard=unmap", name];
    let Some(mut child) = start("qemu-nbd", &arguments, &socket) else { return };
    let disk = open(&socket, "");
    let mut model = vec![0; 2 * MIB];
    let mut random = Random(11);
    let mut queue = disk.queue().unwrap();
    for round in 0..8 {
        for _ in 0..4 {
            batch(&disk, &mut *queue, &mut model, &mut random);
        }
        write(&mut *queue, 0, &[round; 4096]).unwrap();
        model[..4096].fill(round);
        child.kill();
        child = start("qemu-nbd", &arguments, &socket).unwrap();
    }
    assert_eq!(flush(&mut *queue), Ok(()));
    assert!(content(&disk) == model && !disk.has_lost_writes());
    let discard = run_one(&mut *queue, Op::Discard, 0, 2 << 20, Segments::new());
    assert_eq!(discard, Ok(()));
    assert!(content(&disk) == vec![0; 2 * MIB]);
    drop((queue, disk));
    drop(child);
    let check = Command::new("qemu-img").args(["check", "-q", name]).status().unwrap();
    // A kill may leave leaked clusters.
    assert!(matches!(check.code(), Some(0 | 3)), "{check:?}");
}

#[test]
fn tcp() {
    let mut server = None;
    let port = wait::until_some("a server at a port", || {
        let is_alive = |server: &mut Option<(u16, ProcessGroup)>| match server {
            Some((_, child)) => child.try_wait().unwrap().is_none(),
            None => false,
        };
        if !is_alive(&mut server) {
            // After the test has found a free port, another program may take it before `nbdkit`
            // does. Then `nbdkit` ends, and the test tries another port.
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--exit-with-parent", "--ipaddr=127.0.0.1", "--port"]);
            command.args([&port.to_string()[..], "memory", "2M"]);
            match ProcessGroup::spawn(&mut command) {
                Ok(child) => server = Some((port, child)),
                Err(_) => return Some(None),
            }
        }
        let (port, _) = server.as_ref()?;
        let is_there = std::net::TcpStream::connect(("127.0.0.1", *port)).is_ok();
        (is_there && is_alive(&mut server)).then(|| server.as_ref().map(|(port, _)| *port))
    });
    let Some(port) = port else {
        skipped("`nbdkit` is not here");
        return;
    };
    let spec = NbdSpec::parse(&format!("nbd://localhost:{port}/")).unwrap();
    let disk = NbdDisk::open(&spec).unwrap();
    model(&disk, 8, 10);
    drop((disk, server));
}

/// Extents of the whole disk. Adjacent extents of the same kind are merged.
fn extents(disk: &NbdDisk) -> Vec<(u64, bool)> {
    let mut found: Vec<(u64, bool)> = Vec::new();
    disk.extents(0, disk.info().bytes(), &mut |extent| {
        match found.last_mut() {
            Some((len, allocated)) if *allocated == extent.allocated => *len += extent.len,
            _ => found.push((extent.len, extent.allocated)),
        }
        true
    });
    found
}

#[test]
fn unallocated_parts_of_nbdkit_are_holes() {
    const MIB: u64 = 1 << 20;
    let Some(peer) = Peer::start("nbdkit", &["memory", "4M"]) else { return };
    let disk = peer.open("");
    assert_eq!(extents(&disk), [(4 * MIB, false)]);
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, MIB, &[7; 65536]).unwrap();
    let expected = [(MIB, false), (65536, true), (3 * MIB - 65536, false)];
    assert_eq!(extents(&disk), expected);
    // The range starts within an extent, and the callback stops after the first one.
    let mut first = None;
    disk.extents(MIB + 512, MIB, &mut |extent| {
        first = Some((extent.len, extent.allocated));
        false
    });
    assert_eq!(first, Some((65536 - 512, true)));
    let Some(peer) = Peer::start("nbdkit", &["--filter=noextents", "memory", "4M"]) else { return };
    assert_eq!(extents(&peer.open("")), [(4 * MIB, true)]);
}

struct Certificates {
    authority: Authority,
    directory: TempDir,
}

impl Certificates {
    fn new() -> Self {
        let made = Self { authority: Authority::new(), directory: tempfile::tempdir().unwrap() };
        made.authority.write_all(made.directory.path());
        made
    }

    /// Starts an nbdkit with a memory disk that requires client certificates.
    fn nbdkit(&self, more: &[&str]) -> Option<Peer> {
        let directory = format!("--tls-certificates={}", self.directory.path().display());
        let tls = [&directory[..], "--tls=require", "--tls-verify-peer"];
        Peer::start("nbdkit", &[&tls[..], more, &["memory", "2M"]].concat())
    }
}

fn try_open(peer: &Peer, certificates: &Path, more: &str) -> Result<NbdDisk, String> {
    let socket = peer.directory.path().join("nbd");
    let (socket, certificates) = (socket.display(), certificates.display());
    let spec = format!("nbds+unix:///?socket={socket}&tls-certificates={certificates}{more}");
    NbdDisk::open(&NbdSpec::parse(&spec).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn nbdkit_over_tls() {
    let certificates = Certificates::new();
    let Some(peer) = certificates.nbdkit(&[]) else { return };
    let disk = try_open(&peer, certificates.directory.path(), "").unwrap();
    let about = disk.describe();
    assert!(about.starts_with("NBD by TLS with 4 connections"), "{about}");
    model(&disk, 12, 20);
}

/// Requests wait while there is no server. The connection to the next server negotiates TLS as
/// well.
#[test]
fn nbdkit_over_tls_killed_and_restarted() {
    let certificates = Certificates::new();
    let Some(mut peer) = certificates.nbdkit(&[]) else { return };
    let options = "&replay=4MiB&connections=2";
    let disk = try_open(&peer, certificates.directory.path(), options).unwrap();
    let mut queue = disk.queue().unwrap();
    let data = Random(9).bytes(MIB);
    write(&mut *queue, 0, &data).unwrap();
    peer.child.kill();
    let socket = peer.directory.path().join("nbd");
    let directory = format!("--tls-certificates={}", certificates.directory.path().display());
    let arguments = [&directory[..], "--tls=require", "--tls-verify-peer", "memory", "2M"];
    peer.child = start("nbdkit", &arguments, &socket).unwrap();
    // The killed server has lost the data in its memory. So the disk replays the unflushed writes.
    assert!(read(&mut *queue, 0, MIB).unwrap() == data);
    assert_eq!(flush(&mut *queue), Ok(()));
    assert!(disk.counters()[1].1 > 0);
}

#[test]
fn each_tls_error_has_its_message() {
    let certificates = Certificates::new();
    let own = certificates.directory.path();
    let Some(peer) = certificates.nbdkit(&[]) else { return };
    let refused = |directory: &Path, more: &str| try_open(&peer, directory, more).unwrap_err();
    let text = refused(own, "&tls-hostname=other.example");
    assert!(text.contains("not for this host but for localhost, 127.0.0.1, "), "{text}");
    let other_ca = tempfile::tempdir().unwrap();
    Authority::new().write_all(other_ca.path());
    let text = refused(other_ca.path(), "");
    assert!(text.contains("not signed by the CA in ca-cert.pem"), "{text}");
    // gnutls closes the connection of a client without a certificate, or with a certificate of
    // another CA.
    let ca_only = tempfile::tempdir().unwrap();
    certificates.authority.write_ca(ca_only.path());
    let text = refused(ca_only.path(), "");
    assert!(text.contains("TLS handshake failed") || text.contains("connection failed"), "{text}");
    Authority::new().write_certificate(
        ca_only.path(),
        CertificatePurpose::Client,
        &CertificateSpec::default(),
    );
    let text = refused(ca_only.path(), "");
    assert!(text.contains("TLS handshake failed") || text.contains("connection failed"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    let text = refused(empty.path(), "");
    assert!(text.contains("ca-cert.pem cannot be read"), "{text}");
    // Either the server requires TLS and the client does not use it, or the reverse.
    let socket = peer.directory.path().join("nbd");
    let spec = NbdSpec::parse(&format!("nbd+unix:///?socket={}", socket.display())).unwrap();
    let text = NbdDisk::open(&spec).err().unwrap().to_string();
    assert!(text.contains("requires TLS"), "{text}");
    let Some(plain) = Peer::start("nbdkit", &["--tls=off", "memory", "2M"]) else { return };
    let text = try_open(&plain, own, "").unwrap_err();
    assert!(text.contains("does not support TLS"), "{text}");
}
