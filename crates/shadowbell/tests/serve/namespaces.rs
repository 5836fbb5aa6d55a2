//! Namespaces that are added, changed and removed while a server runs, and their state after
//! crashes and upgrades.

use crate::control::{ctl, ctl_json};
use crate::harness::{Server, attach, complete, finish, image, program, until};
use crate::recover::kill;
use crate::supervisor::{children, worker};
use crate::upgrade::{Client, server, socket};
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use std::os::unix::net::UnixStream;

/// Runs `ctl`. It must fail with the given status and an error that has `words`.
#[track_caller]
fn refused(server: &Server, arguments: &[&str], status: i32, words: &str) {
    let (code, _, errors) = ctl(server, arguments);
    assert!(code == Some(status) && errors.contains(words), "{arguments:?}: {code:?} {errors}");
}

/// Runs `ctl`, which must succeed. Returns the namespace or disk in the response.
#[track_caller]
fn done(server: &Server, arguments: &[&str]) -> Value {
    let answer = ctl_json(server, arguments);
    answer[0].clone()
}

fn nsids(server: &Server) -> Vec<u64> {
    let all = ctl_json(server, &["namespaces"]);
    all.as_array().unwrap().iter().map(|one| one["nsid"].as_u64().unwrap()).collect()
}

#[test]
fn a_namespace_is_added_changed_and_removed_beside_a_guest() {
    let directory = tempfile::tempdir().unwrap();
    let first = image(directory.path(), "a.img", 4 << 20);
    image(directory.path(), "b.img", 8 << 20);
    image(directory.path(), "c.img", 8 << 20);
    let mut server = Server::start_in(directory, &["a.img"], &[]);
    let mut guest = Client::attach(&server.socket());
    guest.write(1, 0, 1);
    let add = [
        "namespace",
        "attach",
        "vm.sock",
        "3",
        "b.img",
        "--uuid",
        "0190163d-8694-739b-aea5-966c26f8ad91",
    ];
    let added = done(&server, &add);
    assert_eq!((&added["nsid"], &added["bytes"]), (&json!(3), &json!(8 << 20)));
    assert_eq!(added["uuid"], "0190163d-8694-739b-aea5-966c26f8ad91");
    assert_eq!(done(&server, &add), added, "the same again changes nothing");
    assert_eq!(nsids(&server), [1, 3]);
    refused(
        &server,
        &["namespace", "attach", "vm.sock", "3", "c.img"],
        4,
        "namespace 3 exists already",
    );
    refused(
        &server,
        &["namespace", "attach", "vm.sock", "1", "b.img"],
        4,
        "namespace 1 exists already",
    );
    refused(
        &server,
        &["namespace", "attach", "vm.sock", "2", "b.img"],
        4,
        "this server has it open",
    );
    refused(&server, &["namespace", "attach", "vm.sock", "2", "no.img"], 2, "no.img");
    refused(&server, &["namespace", "attach", "vm.sock", "257", "c.img"], 2, "257");
    refused(&server, &["namespace", "attach", "vm7", "2", "c.img"], 3, "no controller `vm7`");
    refused(
        &server,
        &["namespace", "attach", "vm.sock", "2", "c.img", "--uuid", "x"],
        2,
        "no UUID",
    );
    let same = added["uuid"].as_str().unwrap();
    refused(
        &server,
        &["namespace", "attach", "vm.sock", "2", "c.img", "--uuid", same],
        2,
        "the same UUID",
    );
    assert_eq!(nsids(&server), [1, 3]);

    // Without a size, `disk resize` uses the size of the file. The file has grown.
    assert_eq!(done(&server, &["disk", "resize", "vm.sock/1"])["bytes"], 4 << 20);
    std::fs::OpenOptions::new().write(true).open(first).unwrap().set_len(16 << 20).unwrap();
    assert_eq!(done(&server, &["disk", "resize", "vm.sock/1"])["bytes"], 16 << 20);
    refused(&server, &["disk", "resize", "vm.sock/7"], 3, "there is no disk");

    // A namespace becomes read-only and writable again.
    assert_eq!(
        done(&server, &["disk", "read-only", "vm.sock/3", "on", "--force"])["read_only"],
        true
    );
    assert_eq!(done(&server, &["disk", "read-only", "vm.sock/3", "on"])["read_only"], true);
    assert_eq!(done(&server, &["disk", "read-only", "vm.sock/3", "off"])["read_only"], false);

    // To the guest, the new disk has the UUID of the old one. The old disk is free after the
    // replacement.
    let replaced = done(&server, &["disk", "replace", "vm.sock/3", "c.img", "--force"]);
    assert_eq!(replaced["bytes"], json!(8 << 20));
    assert!(replaced["source"].as_str().unwrap().ends_with("c.img"));
    assert_eq!(ctl_json(&server, &["namespaces"])[1]["uuid"], added["uuid"]);
    let other = ["disk", "replace", "vm.sock/3", "mem:1MiB?block-size=4096", "--force"];
    refused(&server, &other, 4, "blocks of");
    done(&server, &["namespace", "attach", "vm.sock", "2", "b.img", "--read-only"]);
    assert_eq!(nsids(&server), [1, 2, 3]);
    refused(&server, &["disk", "read-only", "vm.sock/2", "off"], 4, "when it is opened");

    assert_eq!(ctl(&server, &["namespace", "detach", "vm.sock", "2", "--force"]).0, Some(0));
    refused(&server, &["namespace", "detach", "vm.sock", "2"], 3, "no namespace 2");
    assert_eq!(ctl(&server, &["namespace", "detach", "vm.sock", "3", "--force"]).0, Some(0));
    refused(&server, &["namespace", "detach", "vm.sock", "1"], 4, "has no other namespace");
    assert_eq!(guest.read(1, 0), 1);
    drop(guest);
    let (_, table, _) = ctl(&server, &["namespaces"]);
    assert!(table.contains("16.0 MiB"), "{table}");
    assert!(server.stop().success());
}

/// Controllers and namespaces are added, changed and removed, and after each step the server
/// process is killed or upgraded.
#[test]
fn changed_controllers_and_namespaces_survive_crashes_and_upgrades() {
    let mut server = server(1, &[]);
    image(server.directory(), "b.img", 8 << 20);
    let mut again = 0;
    let mut replace = |server: &Server| {
        again += 1;
        if again % 2 == 0 {
            kill(server, Signal::KILL);
        } else {
            // The supervisor does not know vm9.sock from its own configuration, because it was
            // added at run time. An upgrade finds the server by this socket, too.
            let target = if again == 1 { "vm9.sock" } else { "vm0.sock" };
            let mut command = program();
            command.args(["upgrade", target]).current_dir(server.directory());
            command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
            let (status, _, errors) = finish(command);
            assert_eq!(status, Some(0), "{errors}\n{}", server.stderr());
            until("the old one's end", || children(server.pid()).len() == 1);
        }
    };
    let add = ["controller", "add", "b", "mem:8MiB", "--socket", "vm9.sock"];
    ctl_json(&server, &add);
    let mut other = Client::attach(&socket(&server, 9));
    other.write(1, 0, 1);
    let mut guest = Client::attach(&socket(&server, 0));
    guest.write(2, 8, 1);
    let mut check = |server: &Server, guest: &mut Client, other: &mut Client| {
        let before = ctl_json(server, &["namespaces"]);
        for _ in 0..2 {
            let process = worker(server);
            replace(server);
            assert_ne!(worker(server), process);
            let value = guest.read(2, 8);
            guest.write(2, 8, value + 1);
            assert_eq!(guest.read(2, 8), value + 1);
            assert_eq!(other.read(1, 0), 1);
            assert_eq!(ctl_json(server, &["namespaces"]), before);
        }
    };
    check(&server, &mut guest, &mut other);
    let vm = "vm0.sock";
    done(&server, &["namespace", "attach", vm, "7", "b.img"]);
    check(&server, &mut guest, &mut other);
    assert_eq!(done(&server, &["disk", "resize", "vm0.sock/2", "32MiB"])["bytes"], 32 << 20);
    done(&server, &["disk", "read-only", "vm0.sock/7", "on", "--force"]);
    check(&server, &mut guest, &mut other);
    done(&server, &["disk", "replace", "vm0.sock/7", "mem:1MiB", "--force"]);
    let uuid = ctl_json(&server, &["namespaces"])[2]["uuid"].clone();
    assert_eq!(ctl(&server, &["namespace", "detach", vm, "1", "--force"]).0, Some(0));
    check(&server, &mut guest, &mut other);
    assert_eq!(nsids(&server), [2, 7, 1]);
    drop(other);
    until("its end", || ctl_json(&server, &["controllers", "b"])[0]["client"] == false);
    assert_eq!(ctl(&server, &["controller", "remove", "b"]).0, Some(0));
    kill(&server, Signal::KILL);
    assert_eq!(nsids(&server), [2, 7]);
    assert!(UnixStream::connect(socket(&server, 9)).is_err());
    let log = server.stderr();
    assert!(!log.contains("have lost"), "{log}");
    // A guest that attaches again finds the current namespaces.
    drop(guest);
    until("its end", || ctl_json(&server, &["status"])["clients"] == 0);
    let guest = attach(&socket(&server, 0), &AttachOptions::default());
    assert!(guest.namespace(1).is_none() && guest.namespace(2).unwrap().bytes() == 32 << 20);
    assert_eq!(guest.namespace(7).unwrap().bytes(), 1 << 20);
    drop(guest);
    let now = ctl_json(&server, &["namespaces"]);
    assert_eq!(now[1]["uuid"], uuid);

    // A server that is started with the saved configuration serves the same controllers and
    // namespaces.
    let (status, text, errors) = ctl(&server, &["save-config", "saved.toml"]);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(text, "configuration written to saved.toml\n");
    let plan = ctl_json(&server, &["apply", "saved.toml", "--dry-run"]);
    assert_eq!(
        (&plan["unchanged"], &plan["add"], &plan["remove"]),
        (&json!(1), &json!([]), &json!([]))
    );
    assert!(server.stop().success(), "{}", server.stderr());
    let directory = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["serve", "--config"]).arg(server.directory().join("saved.toml"));
    let saved = socket(&server, 0);
    let mut next = Server::spawn(command, directory, &[saved.to_str().unwrap()]);
    let then = ctl_json(&next, &["namespaces", "--server", "vms"]);
    assert_eq!(then, now);
    assert!(next.stop().success());
}

/// Number of requests that the rate limit of a namespace has delayed.
fn delayed(server: &Server, at: usize) -> u64 {
    ctl_json(server, &["namespaces"])[at]["counters"]["delayed"].as_u64().unwrap_or(0)
}

/// Keeps 8 reads in flight until `count` reads have completed. Between completions, the I/O thread
/// sleeps.
fn read_many(server: &Server, nsid: u32, count: usize) {
    let mut guest = server.attach();
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(8, 4096).unwrap();
    let read = guest.namespace(nsid).unwrap().read(0, 8).unwrap();
    let (mut begun, mut ended) = (0, 0);
    while ended < count {
        while begun < count && begun - ended < 8 {
            queue.submit(read, pool.take()).unwrap();
            begun += 1;
        }
        queue.ring().unwrap();
        assert_eq!(complete(&mut queue).status, Status::SUCCESS);
        ended += 1;
    }
    drop((queue, pool, guest));
    until("the guest's end", || ctl_json(server, &["status"])["clients"] == 0);
}

#[test]
fn limits_change_at_run_time_and_survive_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let file = "
        name = \"vm\"
        poll = \"never\"
        [[limit-group]]
        name = \"slow\"
        iops = \"2000:1\"
        [[controller]]
        socket = \"vm.sock\"
        disks = [\"mem:4MiB\", \"mem:4MiB?limit-group=slow\"]
    ";
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vm.toml"]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    read_many(&server, 1, 50);
    read_many(&server, 2, 50);
    assert_eq!(delayed(&server, 0), 0);
    assert!(delayed(&server, 1) >= 40, "{}", delayed(&server, 1));
    let limit = ["limit", "vm.sock/1", "--iops", "1000:1", "--write-bandwidth", "100MiB"];
    let now = ctl_json(&server, &limit);
    assert_eq!(now[0]["limits"], json!({"iops": "1000:1", "write_bandwidth": "100MiB"}));
    assert_eq!(ctl_json(&server, &limit), now);
    read_many(&server, 1, 50);
    let before = delayed(&server, 0);
    assert!(before >= 40, "{before}");
    // A change of limits also applies to requests that already wait.
    ctl_json(&server, &["limit", "vm.sock/1", "--iops", "1000000:1000000", "--group", "slow"]);
    let groups = ctl_json(&server, &["limit-group", "set", "slow", "--iops", "1000000"]);
    assert_eq!(groups, json!([{"name": "slow", "limits": {"iops": "1000000"}}]));
    for (arguments, words) in [
        (&["limit", "vm.sock/1", "--iops", "many"][..], "`iops`"),
        (&["limit", "--iops", "7"], "no disk was named"),
        (&["limit-group", "add", "a/b", "--iops", "7"], "is not a group name"),
    ] {
        let (code, _, errors) = ctl(&server, arguments);
        let errors = errors.to_lowercase();
        assert!(code == Some(2) && errors.contains(words), "{arguments:?}: {code:?} {errors}");
    }
    let (_, table, _) = ctl(&server, &["namespaces"]);
    assert!(table.contains("iops=1000000:1000000, write-bandwidth=100MiB"), "{table}");
    assert!(table.contains("as slow"), "{table}");
    kill(&server, Signal::KILL);
    let seen = |server: &Server| {
        let all = ctl_json(server, &["namespaces"]);
        [all[0]["limits"].clone(), all[1]["limits"].clone()]
    };
    let limits = seen(&server);
    let own = json!({"iops": "1000000:1000000", "write_bandwidth": "100MiB", "group": "slow"});
    assert_eq!(limits[0], own);
    assert_eq!(ctl_json(&server, &["limit-group", "ls"]), groups);
    assert_eq!(ctl(&server, &["upgrade"]).0, Some(0));
    assert_eq!((seen(&server), ctl_json(&server, &["limit-group", "ls"])), (limits, groups));
    // An upgrade does not wait for requests that wait for a rate limit.
    ctl_json(&server, &["limit", "vm.sock/1", "--iops", "1:1"]);
    let mut guest = server.attach();
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(8, 4096).unwrap();
    let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
    for _ in 0..8 {
        queue.submit(read, pool.take()).unwrap();
    }
    queue.ring().unwrap();
    until("requests that wait", || delayed(&server, 0) >= 7);
    let (code, _, errors) = ctl(&server, &["upgrade"]);
    assert_eq!(code, Some(0), "{errors}");
    (0..8).for_each(|_| assert_eq!(complete(&mut queue).status, Status::SUCCESS));
    drop((queue, pool, guest));
    ctl_json(&server, &["limit", "vm.sock/1", "--none"]);
    assert_eq!(seen(&server)[0], Value::Null);
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(saved.contains("[[limit-group]]\nname = \"slow\"\niops = \"1000000\""), "{saved}");
    assert!(saved.contains("mem:4MiB?limit-group=slow"), "{saved}");
    assert!(server.stop().success());
}
