//! After an upgrade to a new program, the supervisor also executes the new program.

use crate::control::ctl;
use crate::harness::{Server, finish, program, until};
use crate::recover::kill;
use crate::supervisor::{children, signal, worker};
use crate::upgrade::{Client, Load, server, socket, upgrade};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Executable of the supervisor.
fn executable_of(server: &Server) -> PathBuf {
    std::fs::read_link(format!("/proc/{}/exe", server.pid())).unwrap()
}

/// Targets of the supervisor's descriptors, sorted.
fn descriptors(server: &Server) -> Vec<String> {
    let directory = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
    let place = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.ok().and_then(|entry| std::fs::read_link(entry.path()).ok())
    };
    let mut all: Vec<_> =
        directory.filter_map(|entry| Some(place(entry)?.to_string_lossy().into_owned())).collect();
    all.sort();
    all
}

/// Targets of the supervisor's descriptors, after they have not changed for 100 ms.
fn stable_descriptors(server: &Server) -> Vec<String> {
    let mut last = Vec::new();
    for _ in 0..100 {
        let now = descriptors(server);
        if now == last {
            break;
        }
        last = now;
        // The descriptors have settled if they stay the same for this time.
        std::thread::sleep(Duration::from_millis(100));
    }
    last
}

fn make_executable(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Creates another program: a copy of the program under test at another path.
fn copy_program(server: &Server, name: &str) -> PathBuf {
    let path = server.directory().join(name);
    if std::fs::hard_link(env!("CARGO_BIN_EXE_shadowbell"), &path).is_err() {
        std::fs::copy(env!("CARGO_BIN_EXE_shadowbell"), &path).unwrap();
    }
    path.canonicalize().unwrap()
}

/// Creates a wrapper of the program under test. If the supervisor starts it to check whether it can
/// read the supervisor's state, the wrapper runs `script`.
fn wrapper(server: &Server, script: &str) -> PathBuf {
    let path = server.directory().join("wrapper");
    let program = env!("CARGO_BIN_EXE_shadowbell");
    let text = format!(
        "#!/bin/sh\nif [ \"$1\" = supervisor-check ]; then\n{script}\nfi\nexec {program} \"$@\"\n"
    );
    std::fs::write(&path, text).unwrap();
    make_executable(&path);
    path.canonicalize().unwrap()
}

#[track_caller]
fn upgrade_to(server: &Server, program: &Path) -> String {
    let (status, output, errors) = upgrade(&server.pid().to_string(), Some(program));
    assert_eq!(status, Some(0), "{errors}");
    output
}

#[test]
fn a_supervisor_executes_the_new_program_after_an_upgrade() {
    let mut server = server(4, &[]);
    let mut client = Client::attach(&socket(&server, 2));
    client.write(1, 0, 1);
    client.write(2, 0, 2);
    let loads = [(0, 1), (1, 2), (3, 1)];
    let loads = loads.map(|(controller, nsid)| Load::start(&server, controller, nsid));
    // When these lines are in the log, the supervisor has received all descriptors of the loads.
    until("the loads' queues", || {
        server.stderr().matches("the guest has 1 I/O queue").count() >= 4
    });
    let programs = [copy_program(&server, "one"), copy_program(&server, "two")];
    let mut before = None;
    for n in 0..20_u8 {
        let program = &programs[usize::from(n % 2)];
        let output = upgrade_to(&server, program);
        assert!(output.contains("; its supervisor runs that program too"), "{output}");
        assert_eq!(executable_of(&server), *program);
        assert!(server.is_alive(), "the supervisor is the same process");
        // The server process is still a child of the supervisor after the exec, so the supervisor
        // restarts it after a kill.
        if n % 5 == 4 {
            // The process serves for a while, so that its death is not part of a crash loop.
            std::thread::sleep(Duration::from_millis(80));
            kill(&server, Signal::KILL);
        }
        assert_eq!((client.read(1, 0), client.read(2, 0)), (n + 1, n + 2));
        client.write(1, 0, n + 2);
        client.write(2, 0, n + 3);
        assert_eq!(children(server.pid()).len(), 1);
        // The number of descriptors is checked repeatedly, because the request socket of the old
        // server process is closed a moment later.
        let most: &Vec<_> = before.get_or_insert_with(|| stable_descriptors(&server));
        until("no more descriptors than before", || descriptors(&server).len() <= most.len());
    }
    // Threads of the supervisor: the main thread, one that closes descriptors of clients, the log
    // thread, and three brokers.
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count();
    assert_eq!(threads, 6);
    loads.into_iter().for_each(Load::assert_no_loss);
    let log = server.stderr();
    assert!(!log.contains("have lost") && !log.contains("keeps running the old program"), "{log}");
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!((0..4).all(|n| !socket(&server, n).exists()));
}

/// After the supervisor has executed another program, the server can still open images through it.
#[test]
fn images_can_be_opened_after_the_supervisors_change() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 1);
    upgrade_to(&server, &copy_program(&server, "one"));
    // Both the server process that ran during the exec and later ones can open the image.
    let image = crate::harness::image(server.directory(), "later.img", 1 << 20);
    let add = |nsid: &str| {
        let add = ["namespace", "attach", "vm0.sock", nsid, image.to_str().unwrap()];
        let (status, _, errors) = ctl(&server, &add);
        assert_eq!(status, Some(0), "{errors}");
    };
    add("3");
    for n in 1..4 {
        kill(&server, Signal::KILL);
        assert_eq!(client.read(1, 0), n);
        client.write(1, 0, n + 1);
    }
    let log = server.stderr();
    assert!(!log.contains("have lost"), "{log}");
}

#[test]
fn a_program_that_cannot_continue_is_not_executed() {
    let mut server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    let old = executable_of(&server);
    for (script, why) in [
        ("exit 2", "no support for that"),
        ("kill -9 $$", "no support for that"),
        (
            "echo 'the state has version 1, and this program reads versions 2 to 3'; exit 1",
            "this program reads versions 2 to 3",
        ),
        ("sleep 1000", "did not answer within 10 s"),
        // The program passes the check, and makes itself not executable, so that the exec fails.
        ("printf 'can go on'; chmod -x \"$0\"; exit 0", "Permission denied"),
    ] {
        until("one worker", || children(server.pid()).len() == 1);
        let before = worker(&server);
        let wrapper = wrapper(&server, script);
        let output = upgrade_to(&server, &wrapper);
        let words = "; its supervisor keeps running the old program: ";
        assert!(output.contains(words) && output.contains(why), "{script}: {output}");
        server.wait_for_log(why);
        assert_eq!(executable_of(&server), old, "{script}");
        // The server process nevertheless runs the new program.
        until("the old one's end", || !children(server.pid()).contains(&before));
        make_executable(&wrapper);
        kill(&server, Signal::KILL);
        assert_eq!(client.read(1, 0), 7, "{script}");
    }
    // The supervisor still receives signals.
    server.signal(Signal::USR1);
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// If server processes die or signals arrive while the supervisor executes the new program, the
/// supervisor still handles them.
#[test]
fn deaths_and_signals_during_the_supervisors_change_are_not_lost() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    let programs = [copy_program(&server, "one"), copy_program(&server, "two")];
    for n in 0..20_u64 {
        client.write(1, 0, n as u8);
        let program = &programs[usize::from(n % 2 == 0)];
        let target = server.pid().to_string();
        let before = worker(&server);
        std::thread::scope(|scope| {
            let upgrading = scope.spawn(|| upgrade(&target, Some(program)));
            until("the next one", || {
                server.signal(Signal::USR1);
                children(server.pid()).iter().any(|pid| *pid != before) || upgrading.is_finished()
            });
            let next = children(server.pid()).into_iter().find(|pid| *pid != before);
            // The new server process is killed after the old one has ended, and in each round a
            // little later.
            until("the old one's end", || {
                !children(server.pid()).contains(&before) || upgrading.is_finished()
            });
            // The kill comes at an arbitrary moment.
            std::thread::sleep(Duration::from_millis(2 * n));
            if let Some(next) = next
                && children(server.pid()).contains(&next)
            {
                server.signal(Signal::USR1);
                signal(next, Signal::KILL);
            }
            let _ = upgrading.join().unwrap();
        });
        assert_eq!(client.read(1, 0), n as u8);
        // The process serves for a while, so that its death is not part of a crash loop.
        std::thread::sleep(Duration::from_millis(80));
        kill(&server, Signal::KILL);
    }
    let log = server.stderr();
    assert!(!log.contains("have lost"), "{log}");
}

#[test]
fn supervisor_state_options_are_refused_from_users() {
    let mut command = program();
    command.args(["serve", "--as-supervisor", "77", "--supervisor", "mem:1MiB", "--socket", "x"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(1), "{errors}");
    assert!(errors.contains("leave it out"), "{errors}");
    let mut command = program();
    command.arg("supervisor-check");
    let (_, output, _) = finish(command);
    assert!(output.contains("no server state"), "{output}");
}
