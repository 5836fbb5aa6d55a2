//! Named disks: they are attached to one controller after another, and survive crashes and
//! upgrades.

use crate::control::{ctl, ctl_json};
use crate::disk_recovery::Export;
use crate::harness::{Server, finish, image, program, until};
use crate::recover::kill;
use crate::supervisor::worker;
use crate::upgrade::Client;
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_testing::process_group::ProcessGroup;

/// Entry of the disk `id` in the output of `ctl disk ls`.
fn disk(server: &Server, id: &str) -> Value {
    let all = ctl_json(server, &["disk", "ls"]);
    let found = all.as_array().unwrap().iter().find(|disk| disk["id"] == id);
    found.cloned().unwrap_or_default()
}

#[test]
fn a_named_disk_moves_between_controllers_and_survives_crashes() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "data.img", 4 << 20);
    let file = "[[disk]]\nid = \"data\"\nsource = \"data.img\"\n\
                [[disk]]\nid = \"ram\"\nsource = \"mem:1MiB\"\nlimits = { iops = 9000 }\n\
                [[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\ndisks = [\"mem:1MiB\", \"ram\"]\n\
                [[controller]]\nid = \"b\"\nsocket = \"vm1.sock\"\ndisks = [\"mem:1MiB\"]\n";
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vm.toml"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock", "vm1.sock"]);
    assert_eq!(disk(&server, "ram")["namespaces"], json!([{"controller": "a", "nsid": 2}]));
    assert_eq!(disk(&server, "ram")["limits"], json!({"iops": "9000"}));
    assert_eq!(disk(&server, "b/1")["bytes"], 1 << 20);
    assert_eq!(disk(&server, "data")["namespaces"], json!([]));
    let restart = |server: &Server, is_crash: bool| {
        let before = (worker(server), ctl_json(server, &["disk", "ls"]));
        if is_crash {
            kill(server, Signal::KILL);
        } else {
            assert_eq!(ctl(server, &["upgrade"]).0, Some(0), "{}", server.stderr());
        }
        until("another process", || worker(server) != before.0);
        // Controllers are recovered one by one, so the list is complete only after some time.
        until("the same disks", || ctl_json(server, &["disk", "ls"]) == before.1);
    };
    restart(&server, true);
    // Data that one guest has written is read by the next.
    ctl_json(&server, &["namespace", "attach", "a", "5", "data"]);
    let mut guest = Client::attach(&server.directory().join("vm0.sock"));
    guest.write(5, 0, 7);
    let (code, _, errors) = ctl(&server, &["namespace", "attach", "b", "5", "data"]);
    assert!(code == Some(4) && errors.contains("namespace 5 of"), "{errors}");
    let (code, _, errors) = ctl(&server, &["disk", "remove", "data"]);
    assert!(code == Some(4) && errors.contains("ctl namespace detach a 5"), "{errors}");
    restart(&server, true);
    assert_eq!(guest.read(5, 0), 7);
    assert_eq!(ctl(&server, &["namespace", "detach", "a", "5", "--force"]).0, Some(0));
    assert_eq!(disk(&server, "data")["namespaces"], json!([]));
    restart(&server, false);
    restart(&server, true);
    ctl_json(&server, &["namespace", "attach", "b", "2", "data"]);
    let mut other = Client::attach(&server.directory().join("vm1.sock"));
    assert_eq!(other.read(2, 0), 7);
    drop((guest, other));
    // Removing a controller detaches its named disks.
    until("its end", || ctl_json(&server, &["controllers", "b"])[0]["client"] == false);
    assert_eq!(ctl(&server, &["controller", "remove", "b"]).0, Some(0));
    assert_eq!(disk(&server, "data")["namespaces"], json!([]));
    assert_eq!(disk(&server, "b/1"), Value::Null);
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(saved.contains("id = \"data\"") && saved.contains("\"ram\""), "{saved}");
    // Unattached disks can be changed and removed.
    let read_only = ctl_json(&server, &["disk", "read-only", "data", "on"]);
    assert_eq!(read_only[0]["read_only"], true);
    ctl_json(&server, &["limit", "data", "--iops", "5"]);
    restart(&server, true);
    assert_eq!(disk(&server, "data")["limits"], json!({"iops": "5"}));
    // A replacement of the source keeps the limits and the read-only state, and reports this.
    image(server.directory(), "other.img", 4 << 20);
    let (code, text, errors) = ctl(&server, &["disk", "replace", "data", "other.img"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(text.contains("kept from the old source: iops=5, read-only"), "{text}");
    let replaced = disk(&server, "data");
    assert_eq!(
        (&replaced["limits"], &replaced["read_only"]),
        (&json!({"iops": "5"}), &json!(true))
    );
    // A new controller can use the named disk by its id.
    let added = ctl_json(&server, &["controller", "add", "c", "data", "--socket", "c.sock"]);
    assert_eq!(added[0]["namespaces"][0]["disk_id"], "data");
    assert_eq!(ctl(&server, &["controller", "remove", "c"]).0, Some(0));
    assert_eq!(ctl(&server, &["disk", "remove", "data"]).0, Some(0));
    ctl_json(&server, &["disk", "add", "spare", "data.img"]);
    assert_eq!(disk(&server, "spare")["bytes"], 4 << 20);
    let (code, _, errors) = ctl(&server, &["disk", "add", "spare", "mem:1MiB"]);
    assert!(code == Some(4) && errors.contains("exists already"), "{errors}");
    // Applying the original configuration file undoes the changes of the disks.
    let (code, _, errors) = ctl(&server, &["apply", "vm.toml"]);
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(disk(&server, "spare"), Value::Null);
    assert_eq!(disk(&server, "data")["read_only"], false);
    restart(&server, true);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// The error message about an image that this server already has open names the disk that uses the
/// image.
#[test]
fn an_image_of_this_server_is_named_by_its_disk() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "a.img", 1 << 20);
    let mut server = Server::start_in(directory, &["a.img"], &["--supervisor", "--allow", "."]);
    for words in [
        &["namespace", "attach", "vm.sock", "2", "a.img"][..],
        &["disk", "add", "d", "a.img"],
        &["controller", "add", "b", "a.img", "--socket", "b.sock"],
    ] {
        let (code, _, errors) = ctl(&server, words);
        let text = "this server has it open as the disk";
        assert!(code == Some(4) && errors.contains(text), "{words:?}: {errors}");
    }
    assert!(server.stop().success());
}

/// The UUID of a disk is random, and is stored in the state directory, so that every later server
/// process uses the same UUID.
#[test]
fn a_disk_keeps_its_uuid_in_the_state_directory() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "a.img", 1 << 20);
    image(directory.path(), "b.img", 1 << 20);
    let options = ["--supervisor", "--state-dir", "state", "--allow", "."];
    let mut server = Server::start_in(directory, &["a.img"], &options);
    let at = server.directory().to_owned();
    ctl_json(&server, &["namespace", "attach", "vm.sock", "2", "b.img"]);
    let uuids = || {
        let all = ctl_json(&server, &["namespaces"]);
        let uuids = all.as_array().unwrap().iter().map(|one| one["uuid"].as_str().unwrap());
        uuids.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = uuids();
    assert!(before.len() == 2 && before[0] != before[1], "{before:?}");
    let stored = std::fs::read_to_string(at.join("state/disk-uuids")).unwrap();
    assert!(before.iter().all(|uuid| stored.contains(&uuid[..])), "{stored}");
    assert!(server.stderr().contains(&format!("UUID {}", before[0])), "{}", server.stderr());
    let process = worker(&server);
    // The file may have UUIDs of disks of other servers, so the process in the sandbox does not
    // have it open.
    let has_file = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", worker(&server))).unwrap();
        let mut paths = all.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        paths.any(|path| path.ends_with("state/disk-uuids"))
    };
    assert!(!has_file(), "{}", server.stderr());
    kill(&server, Signal::KILL);
    until("another process", || worker(&server) != process);
    assert_eq!(uuids(), before);
    assert!(!has_file(), "{}", server.stderr());
    assert_eq!(ctl(&server, &["namespace", "detach", "vm.sock", "2", "--force"]).0, Some(0));
    // Another server with the same state directory uses the same UUID, but a server that cannot
    // write to its state directory does not.
    for (state, is_kept) in [("state", true), ("b.img", false)] {
        let mut other = program();
        other.args([
            "serve",
            "b.img",
            "--socket",
            "o.sock",
            "--name",
            "other",
            "--state-dir",
            state,
        ]);
        other.args(["--stop-timeout", "5"]).current_dir(&at);
        let other = ProcessGroup::spawn(other.env("SHADOWBELL_RUN_DIR", at.join("run"))).unwrap();
        let mut now = serde_json::Value::Null;
        until("the other server", || {
            let (status, output, _) = ctl(&server, &["-s", "other", "namespaces", "--json"]);
            now = serde_json::from_str(&output).unwrap_or_default();
            status == Some(0)
        });
        assert_eq!(now[0]["uuid"] == before[1], is_kept, "{now}");
        drop(other);
    }
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A disk that waits for its recovery has one owner, the recovery. A second connection to an NBD
/// server would not wait for the writes of the dead process.
#[test]
fn a_disk_that_is_being_recovered_is_not_opened_again() {
    let storage = Export::start("mem:4MiB");
    let uri = storage.uri("&settle=50ms");
    let directory = tempfile::tempdir().unwrap();
    let file = format!(
        "[[disk]]\nid = \"far\"\nsource = \"{uri}\"\n\
         [[controller]]\nid = \"a\"\nsocket = \"vm.sock\"\ndisks = [\"mem:1MiB\"]\n"
    );
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vm.toml"]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    assert_eq!(disk(&server, "far")["bytes"], 4 << 20);
    let process = worker(&server);
    storage.stall();
    kill(&server, Signal::KILL);
    until("another process", || worker(&server) != process);
    until("the controller", || disk(&server, "a/1")["bytes"] == 1 << 20);
    assert_eq!(disk(&server, "far"), Value::Null);
    for words in [
        &["disk", "add", "far", &uri][..],
        &["disk", "add", "other", &uri],
        &["disk", "remove", "far"],
        &["namespace", "attach", "a", "2", &uri],
        &["export", "add", "e", "far", "--nbd", "unix:far.sock"],
        &["apply", "vm.toml"],
    ] {
        let (code, _, errors) = ctl(&server, words);
        assert!(code == Some(4) && errors.contains(" waits ("), "{words:?}: {errors}");
    }
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(saved.contains("id = \"far\""), "{saved}");
    storage.signal(Signal::CONT);
    until("the recovered disk", || disk(&server, "far")["bytes"] == 4 << 20);
    assert_eq!(ctl(&server, &["disk", "add", "far", &uri]).0, Some(0));
    let (code, _, errors) = ctl(&server, &["apply", "vm.toml"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_deleted_image_is_marked() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a.img", "b.img"] {
        image(directory.path(), name, 1 << 20);
    }
    let images = ["a.img", "b.img"].map(|name| directory.path().join(name));
    let [a, b] = images.each_ref().map(|path| path.to_str().unwrap());
    let mut server = Server::start_in(directory, &[a, b], &[]);
    let deleted = || {
        let all = ctl_json(&server, &["disk", "ls"]);
        [all[0]["deleted"].clone(), all[1]["deleted"].clone()]
    };
    assert_eq!(deleted(), [false, false]);
    std::fs::remove_file(b).unwrap();
    assert_eq!(deleted(), [false, true]);
    let (_, table, _) = ctl(&server, &["disk", "ls"]);
    assert!(
        table.contains(&format!("/2: its file {b} was deleted, and the data is lost")),
        "{table}"
    );
    assert!(!table.contains(&format!("file {a}")), "{table}");
    let id = ctl_json(&server, &["disk", "ls"])[1]["id"].as_str().unwrap().to_owned();
    let (code, table, _) = ctl(&server, &["disk", "resize", &id, "+1MiB"]);
    assert!(code == Some(0) && table.contains(&format!("file {b} was deleted")), "{table}");
    let mut listing = program();
    listing.arg("ls").env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    let (code, table, errors) = finish(listing);
    let is_marked = |line: &str| line.contains(&id) && line.contains("MiB, deleted");
    assert!(code == Some(0) && table.lines().any(is_marked), "{table}{errors}");
    assert!(server.stop().success());
}
