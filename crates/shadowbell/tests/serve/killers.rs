//! Commands that kill a server's process.

use crate::harness::until;
use crate::supervisor::{signal, worker};
use crate::upgrade::{Client, Load, server_with, socket};
use rustix::process::Signal;
use shadowbell_spec::Status;

/// A client's command kills three processes, and is completed with an error then. Others go on.
#[test]
fn a_command_that_has_killed_three_processes_is_given_up() {
    let server = server_with(2, &[], &[("SHADOWBELL_ABORT_COMMAND", "start:20024,end:20048")]);
    let mut client = Client::attach(&socket(&server, 0));
    let load = Load::start(&server, 1, 1);
    until("the load", || server.stderr().contains("vm1.sock: the guest has 1 I/O queue"));
    client.write(1, 0, 1);
    // Of the file, by its end; of the memory, before it is carried out. Beyond what the load uses.
    for (nsid, lba) in [(1, 20048), (2, 20024)] {
        assert_eq!(client.try_write(nsid, lba, 3), Status::INTERNAL.with_dnr());
        client.write(1, 0, 2);
    }
    let log = server.stderr();
    assert_eq!(log.matches("was ended by signal").count(), 6, "{log}");
    assert_eq!(log.matches("is completed with Internal Error").count(), 2, "{log}");
    assert!(!log.contains("have lost"), "{log}");
    assert_eq!(client.read(1, 0), 2);
    load.lost_nothing();
}

/// Each process that goes on is killed with the same command in hand, and that is nobody's fault.
#[test]
fn a_command_that_processes_are_killed_with_is_carried_out() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("abort");
    let server = server_with(1, &[], &[("SHADOWBELL_ABORT_FILE", file.to_str().unwrap())]);
    let mut client = Client::attach(&socket(&server, 0));
    // One line for each of the next processes.
    std::fs::write(&file, "sq-stored\nreplay-started\nreplay-recorded\nreplay-started").unwrap();
    signal(worker(&server), Signal::KILL);
    client.write(1, 0, 5);
    let log = server.stderr();
    assert_eq!(log.matches("was ended by signal 9").count(), 5, "{log}");
    assert!(!log.contains("Internal Error") && !log.contains("have lost"), "{log}");
    assert_eq!(client.read(1, 0), 5);
}
