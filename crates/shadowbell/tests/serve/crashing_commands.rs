//! Commands and messages that crash the server process.

use crate::harness::until;
use crate::supervisor::{signal, worker};
use crate::upgrade::{Client, Load, server_with, socket};
use rustix::process::Signal;
use shadowbell_spec::Status;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{Client as Peer, Options};
use shadowbell_vfio_user::wire::command;

/// A command that has crashed three server processes is completed with an error. Other clients
/// continue.
#[test]
fn a_command_that_killed_three_processes_fails() {
    let server = server_with(2, &[], &[("SHADOWBELL_ABORT_COMMAND", "start:20024,end:20048")]);
    let mut client = Client::attach(&socket(&server, 0));
    let load = Load::start(&server, 1, 1);
    until("the load", || server.stderr().contains("vm1.sock: the guest has 1 I/O queue"));
    client.write(1, 0, 1);
    // The command to the file disk crashes the process after its execution, and the command to the
    // memory disk before its execution. The load of the other client does not use these LBAs.
    for (nsid, lba) in [(1, 20048), (2, 20024)] {
        assert_eq!(client.try_write(nsid, lba, 3), Status::INTERNAL.with_dnr());
        client.write(1, 0, 2);
    }
    let log = server.stderr();
    assert_eq!(log.matches("was ended by signal").count(), 6, "{log}");
    assert_eq!(log.matches("is completed with Internal Error").count(), 2, "{log}");
    assert!(!log.contains("have lost"), "{log}");
    assert_eq!(client.read(1, 0), 2);
    load.assert_no_loss();
}

/// A message crashes each server process that handles it. After three crashes of processes that
/// have recovered the client, the client is disconnected, and no other. Messages that other clients
/// have sent meanwhile are handled.
#[test]
fn a_client_whose_message_crashes_is_dropped_alone() {
    let message = format!("message:{}", command::DEVICE_FEATURE);
    let server = server_with(3, &[], &[("SHADOWBELL_ABORT_COMMAND", &message)]);
    let mut idle = Client::attach(&socket(&server, 0));
    idle.write(1, 0, 1);
    let load = Load::start(&server, 2, 1);
    until("the load", || server.stderr().contains("vm2.sock: the guest has 1 I/O queue"));
    let hostile = Peer::connect(socket(&server, 1), Options { timeout: Some(LIMIT) }).unwrap();
    hostile.migration_state().unwrap_err();
    server.wait_for_log(
        "vm1.sock: its client cannot be recovered, and is disconnected: server processes have \
         crashed during its recovery or its first message",
    );
    assert_eq!(idle.read(1, 0), 1);
    let mut next = Client::attach(&socket(&server, 1));
    next.write(1, 0, 2);
    let log = server.stderr();
    assert_eq!(log.matches("was ended by signal 6").count(), 4, "{log}");
    assert_eq!(log.matches("is disconnected: ").count(), 1, "{log}");
    assert!(!log.contains("have lost"), "{log}");
    // A client that the next processes recover is not affected.
    signal(worker(&server), Signal::KILL);
    assert_eq!((next.read(1, 0), idle.read(1, 0)), (2, 1));
    load.assert_no_loss();
}

/// A command is in flight when four processes crash during recovery, for another reason. So it must
/// be executed and not fail.
#[test]
fn a_command_in_flight_at_unrelated_kills_is_executed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("abort");
    let server = server_with(1, &[], &[("SHADOWBELL_ABORT_FILE", file.to_str().unwrap())]);
    let mut client = Client::attach(&socket(&server, 0));
    // Each line is the crash point of one of the next processes.
    std::fs::write(&file, "sq-stored\nreplay-started\nreplay-recorded\nreplay-started").unwrap();
    signal(worker(&server), Signal::KILL);
    client.write(1, 0, 5);
    let log = server.stderr();
    assert_eq!(log.matches("was ended by signal 9").count(), 5, "{log}");
    assert!(!log.contains("Internal Error") && !log.contains("have lost"), "{log}");
    assert_eq!(client.read(1, 0), 5);
}
