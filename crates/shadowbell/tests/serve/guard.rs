//! Guard of destructive changes: without `--force`, a change is refused if a connected client would
//! lose something.

use crate::control::{ctl, ctl_json, http_request, request};
use crate::exports::Nbd;
use crate::harness::{Server, image, program, until};
use crate::upgrade::Client;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::os::unix::net::UnixStream;

/// Starts the server `vm` with the controller `vm0`, which has the disks `a.img` and `b.img` of 4
/// MiB.
fn server() -> Server {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "a.img", 4 << 20);
    image(directory.path(), "b.img", 4 << 20);
    image(directory.path(), "c.img", 4 << 20);
    let file = "name = \"vm\"\n\
                [[disk]]\nid = \"data\"\nsource = \"c.img\"\n\
                [[export]]\nid = \"t\"\ndisk = \"data\"\nnbd = \"tcp:127.0.0.1:0\"\n\
                read-only = true\n\
                [[controller]]\nid = \"vm0\"\nsocket = \"vm.sock\"\n\
                disks = [\"a.img\", \"b.img\"]\n";
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vm.toml"]);
    Server::spawn(command, directory, &["vm.sock"])
}

/// Entry of the disk `id` in the output of `ctl disk ls`.
fn disk(server: &Server, id: &str) -> Value {
    let all = ctl_json(server, &["disk", "ls"]);
    all.as_array().unwrap().iter().find(|disk| disk["id"] == id).cloned().unwrap_or_default()
}

/// Checks that a command is refused without `--force`. The error must name the option, the client,
/// and what this client would lose.
#[track_caller]
fn refused(server: &Server, arguments: &[&str], words: &str) {
    let (code, _, errors) = ctl(server, arguments);
    assert_eq!(code, Some(4), "{arguments:?}: {errors}");
    assert!(errors.contains("--force") && errors.contains(words), "{arguments:?}: {errors}");
}

#[test]
fn a_client_loses_nothing_without_force() {
    let mut server = server();
    let mut guest = Client::attach(&server.directory().join("vm.sock"));
    guest.write(2, 8, 3);
    let before = ctl_json(&server, &["controllers"]);
    let client = "the client of vm0 would";
    refused(&server, &["disk", "resize", "vm0/2", "4096"], "4.0 KiB instead of 4.0 MiB");
    refused(&server, &["disk", "resize", "vm0/2", "4096"], client);
    refused(&server, &["disk", "replace", "vm0/2", "mem:4MiB"], "the content of mem:4MiB");
    refused(&server, &["disk", "replace", "vm0/2", "mem:4MiB"], client);
    refused(&server, &["namespace", "detach", "vm0", "2"], "vm0 would lose namespace 2");
    refused(&server, &["controller", "remove", "vm0"], "vm0 would lose the controller");
    refused(&server, &["shutdown"], "vm0 would lose the controller");
    std::fs::write(server.directory().join("none.toml"), "controller = []\n").unwrap();
    refused(&server, &["apply", "none.toml"], "vm0 would lose the controller");
    // The response to an HTTP request has the reason as a code.
    for (method, path, body) in [
        ("PATCH", "/v1/disks/vm0%2F2", r#"{"size":{"bytes":4096}}"#),
        ("DELETE", "/v1/controllers/vm0/namespaces/2", ""),
        ("DELETE", "/v1/controllers/vm0", ""),
        ("POST", "/v1/shutdown", ""),
    ] {
        let (status, body) = http_request(&server, &request(method, path, body));
        let problem: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &problem["code"]), (409, &json!("client-attached")), "{path}: {body}");
    }
    assert_eq!((ctl_json(&server, &["controllers"]), guest.read(2, 8)), (before, 3));

    // A client loses nothing if its disk grows, so growth needs no `--force`.
    let grown = ctl_json(&server, &["disk", "resize", "vm0/2", "+4MiB"]);
    assert_eq!(grown[0]["bytes"], 8 << 20);
    let size = |name: &str| std::fs::metadata(server.directory().join(name)).unwrap().len();
    assert_eq!(size("b.img"), 8 << 20);
    assert_eq!(ctl_json(&server, &["disk", "resize", "vm0/1", "5MiB"])[0]["bytes"], 5 << 20);
    assert_eq!((size("a.img"), guest.read(2, 8)), (5 << 20, 3));

    let resize = ["disk", "resize", "vm0/2", "4MiB", "--force"];
    assert_eq!(ctl_json(&server, &resize)[0]["bytes"], 4 << 20);
    let replace = ["disk", "replace", "vm0/2", "mem:4MiB", "--force"];
    assert_eq!(ctl_json(&server, &replace)[0]["source"], "mem:4MiB");
    assert_eq!(ctl(&server, &["namespace", "detach", "vm0", "2", "--force"]).0, Some(0));
    let forced = "--force was given for a change: the client of vm0 would lose namespace 2";
    assert!(server.stderr().contains(forced));
    assert_eq!(ctl(&server, &["shutdown", "--force"]).0, Some(0));
    drop(guest);
    assert!(server.wait().success(), "{}", server.stderr());
}

#[test]
fn an_export_with_a_client_is_not_removed_without_force() {
    let mut server = server();
    let socket = server.directory().join("nbd.sock");
    let address = format!("unix:{}", socket.display());
    ctl_json(&server, &["export", "add", "e", "data", "--nbd", &address]);
    assert_eq!(ctl(&server, &["export", "remove", "e"]).0, Some(0));
    ctl_json(&server, &["export", "add", "e", "data", "--nbd", &address]);
    let client = Nbd::connect(&socket);
    until("a client", || ctl_json(&server, &["export", "ls"])[0]["queues"] != 0);
    refused(&server, &["export", "remove", "e"], "the client of the export e would lose the disk");
    refused(&server, &["disk", "resize", "data", "4096"], "the client of the export e would");
    refused(&server, &["shutdown"], "the client of the export e would lose the disk data");
    assert_eq!(ctl(&server, &["export", "remove", "e", "--force"]).0, Some(0));
    drop(client);
    assert_eq!(ctl(&server, &["disk", "resize", "data", "4096"]).0, Some(0));
    assert_eq!(disk(&server, "data")["bytes"], 4096);
    // Two exports of a read-only disk must not become two writers when the disk becomes writable.
    ctl_json(&server, &["disk", "read-only", "data", "on"]);
    let other = format!("unix:{}", server.directory().join("other.sock").display());
    ctl_json(&server, &["export", "add", "one", "data", "--nbd", &address]);
    ctl_json(&server, &["export", "add", "two", "data", "--nbd", &other]);
    let (code, _, errors) = ctl(&server, &["disk", "read-only", "data", "off"]);
    let words = "would be written by the export one and the export two";
    assert!(code == Some(4) && errors.contains(words), "{errors}");
    assert_eq!(disk(&server, "data")["read_only"], true);
    assert_eq!(ctl(&server, &["export", "remove", "two"]).0, Some(0));
    assert_eq!(ctl(&server, &["disk", "read-only", "data", "off"]).0, Some(0));
    assert!(server.stop().success());
}

/// Address of an export, as `export ls` shows it.
fn address(server: &Server, id: &str) -> Value {
    let all = ctl_json(server, &["export", "ls"]);
    all.as_array().unwrap().iter().find(|export| export["id"] == id).unwrap()["nbd"].clone()
}

#[test]
fn an_exported_disk_grows_under_its_clients_and_nothing_disconnects_them_without_force() {
    let mut server = server();
    let directory = server.directory().canonicalize().unwrap();
    let (nbd, vhost) = (directory.join("nbd.sock"), directory.join("vhost.sock"));
    let share = "--share";
    let unix = format!("unix:{}", nbd.display());
    ctl_json(&server, &["export", "add", "e", "data", "--nbd", &unix, share]);
    let add = ["export", "add", "v", "data", "--vhost-user-blk", vhost.to_str().unwrap(), share];
    ctl_json(&server, &add);
    let port = address(&server, "t");
    let mut client = Nbd::connect(&nbd);
    let mut vmm = UnixStream::connect(&vhost).unwrap();
    vmm.set_nonblocking(true).unwrap();
    let stays = |vmm: &mut UnixStream| matches!(vmm.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
    assert_eq!((client.size(), client.write(3)), (4 << 20, 0));
    ctl_json(&server, &["disk", "resize", "data", "+4MiB"]);
    assert_eq!((client.read(), client.write(4), Nbd::connect(&nbd).size()), (3, 0, 8 << 20));
    assert!(stays(&mut vmm));
    until("one client", || ctl_json(&server, &["export", "ls"])[0]["queues"] == 1);

    refused(&server, &["limit", "data", "--iops", "90000"], "the export e would be disconnected");
    refused(&server, &["disk", "read-only", "data", "on"], "e could not write the disk any more");
    // A configuration without the export.
    std::fs::write(directory.join("none.toml"), "name = \"vm\"\ncontroller = []\n").unwrap();
    let (code, plan, _) = ctl(&server, &["apply", "none.toml", "--dry-run"]);
    assert!(code == Some(0), "{plan}");
    assert!(
        plan.contains("needs --force: the client of the export e would lose the disk"),
        "{plan}"
    );
    assert_eq!((client.read(), client.write(5)), (4, 0));

    ctl_json(&server, &["limit", "data", "--iops", "90000", "--force"]);
    assert!(client.is_disconnected());
    let mut client = Nbd::connect(&nbd);
    // Once the disk has limits, changes of their values take effect without a disconnect.
    ctl_json(&server, &["limit", "data", "--iops", "80000"]);
    ctl_json(&server, &["limit", "data", "--none"]);
    assert_eq!((disk(&server, "data")["limits"].clone(), client.read()), (Value::Null, 5));
    ctl_json(&server, &["disk", "read-only", "data", "on", "--force"]);
    assert!(client.is_disconnected());
    let mut client = Nbd::connect(&nbd);
    assert_ne!(client.write(6), 0);
    // When the disk is writable again, a new client may write.
    ctl_json(&server, &["disk", "read-only", "data", "off"]);
    assert_eq!((client.read(), Nbd::connect(&nbd).write(7)), (5, 0));
    assert_eq!(address(&server, "t"), port, "the port that the system has chosen");
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_writer_keeps_its_disk_writable_without_force() {
    let mut server = server();
    let mut guest = Client::attach(&server.directory().join("vm.sock"));
    let words = "the client of vm0 could not write namespace 2 any more";
    refused(&server, &["disk", "read-only", "vm0/2", "on"], words);
    guest.write(2, 8, 3);
    let read_only = ["disk", "read-only", "vm0/2", "on", "--force"];
    assert_eq!(ctl_json(&server, &read_only)[0]["read_only"], true);
    assert_eq!(ctl_json(&server, &["disk", "read-only", "vm0/2", "off"])[0]["read_only"], false);
    assert_eq!(guest.read(2, 8), 3);
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_configuration_file_of_an_operator_is_not_replaced_without_force() {
    let mut server = server();
    let path = server.directory().join("vm.toml");
    let own = std::fs::read_to_string(&path).unwrap();
    refused(&server, &["save-config", "vm.toml"], "vm.toml has other lines, which would be lost");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), own);
    // `save-config` also replaces a file that it has written itself only after it has shown the
    // difference, because a compromised server process would choose what its supervisor grants.
    for _ in 0..2 {
        assert_eq!(ctl(&server, &["save-config", "saved.toml"]).0, Some(0));
    }
    let saved = server.directory().join("saved.toml");
    let text = std::fs::read_to_string(&saved).unwrap();
    let other = text.replacen("controller", "x", 1);
    std::fs::write(&saved, &other).unwrap();
    refused(&server, &["save-config", "saved.toml"], "\n+ [[controller]]");
    assert_eq!(std::fs::read_to_string(&saved).unwrap(), other);
    let (status, shown, _) = ctl(&server, &["save-config", "saved.toml", "--force"]);
    assert_eq!(status, Some(0));
    assert!(shown.contains("\n- [[x]]\n+ [[controller]]\n"), "{shown}");
    assert_eq!(std::fs::read_to_string(&saved).unwrap(), text);
    // The owner of the file stays, and a link leads to the file.
    let is_root = rustix::process::geteuid().is_root();
    let owner = if is_root { 65534 } else { rustix::process::geteuid().as_raw() };
    std::fs::write(&saved, &other).unwrap();
    chown(&saved, Some(owner), None).unwrap();
    symlink(&saved, server.directory().join("link.toml")).unwrap();
    assert_eq!(ctl(&server, &["save-config", "link.toml", "--force"]).0, Some(0));
    assert_eq!(std::fs::read_to_string(&saved).unwrap(), text);
    assert_eq!(std::fs::metadata(&saved).unwrap().uid(), owner);
    let (status, _, errors) = ctl(&server, &["save-config", "/dev/null"]);
    assert!(status == Some(2) && errors.contains("no regular file"), "{errors}");
    assert_eq!(std::fs::read_to_string(&saved).unwrap(), text);
    let plan = ctl_json(&server, &["apply", "saved.toml", "--dry-run"]);
    assert_eq!((&plan["unchanged"], &plan["later"]), (&json!(1), &json!([])));
    assert_eq!(ctl(&server, &["save-config", "vm.toml", "--force"]).0, Some(0));
    assert_ne!(std::fs::read_to_string(&path).unwrap(), own);
    assert!(server.stop().success());
}

#[test]
fn a_change_of_limits_leaves_the_others_and_a_query_changes_nothing() {
    let mut server = server();
    let limits = || disk(&server, "vm0/1")["limits"].clone();
    ctl_json(&server, &["limit", "vm0/1", "--iops", "500", "--bandwidth", "10MiB"]);
    for query in [&["limit", "vm0/1"][..], &["limit", "vm0"], &["limit"]] {
        let shown = ctl_json(&server, query);
        let its = shown.as_array().unwrap().iter().find(|disk| disk["id"] == "vm0/1").cloned();
        assert_eq!(its.unwrap()["limits"], json!({"iops": "500", "bandwidth": "10MiB"}));
    }
    ctl_json(&server, &["limit", "vm0/1", "--iops", "700"]);
    assert_eq!(limits(), json!({"iops": "700", "bandwidth": "10MiB"}));
    ctl_json(&server, &["limit", "vm0/1", "--bandwidth", "none"]);
    assert_eq!(limits(), json!({"iops": "700"}));
    // Only `limit-group add` creates a group.
    for arguments in [
        &["limit", "vm0/1", "--group", "nope"][..],
        &["limit-group", "set", "nope", "--iops", "5"],
        &["disk", "add", "x", "mem:1MiB?limit-group=nope"],
        &["namespace", "attach", "vm0", "3", "mem:1MiB?limit-group=nope"],
        &["disk", "replace", "data", "mem:4MiB?limit-group=nope"],
        &["controller", "add", "vm1", "mem:1MiB?limit-group=nope", "--socket", "vm1.sock"],
    ] {
        let (code, _, errors) = ctl(&server, arguments);
        assert!(code == Some(3) && errors.contains("no limit group `nope`"), "{errors}");
    }
    assert_eq!(ctl_json(&server, &["limit-group", "ls"]), json!([]));
    let add = ["limit-group", "add", "db", "--iops", "9000", "--bandwidth", "1GiB"];
    let group = json!([{"name": "db", "limits": {"iops": "9000", "bandwidth": "1GiB"}}]);
    assert_eq!(ctl_json(&server, &add), group);
    assert_eq!(ctl_json(&server, &add), group);
    let other = ["limit-group", "add", "db", "--iops", "1"];
    let (code, _, errors) = ctl(&server, &other);
    assert!(code == Some(4) && errors.contains("limit-group set"), "{errors}");
    let set = ["limit-group", "set", "db", "--iops", "8000"];
    let group = json!([{"name": "db", "limits": {"iops": "8000", "bandwidth": "1GiB"}}]);
    assert_eq!(ctl_json(&server, &set), group);
    ctl_json(&server, &["limit", "vm0/1", "--group", "db"]);
    assert_eq!(limits(), json!({"iops": "700", "group": "db"}));
    ctl_json(&server, &["limit", "vm0/1", "--none"]);
    assert_eq!((limits(), ctl_json(&server, &["limit-group", "ls"])), (Value::Null, group));
    assert!(server.stop().success());
}
