//! `ctl apply` of files that attach, detach and move named disks and change their sources.

use crate::control::{ctl, ctl_json};
use crate::exports::{Nbd, Unmount, start};
use crate::harness::{Server, image, until};
use crate::machine::{BLOCK, BLOCKS};
use crate::shared::serve_config;
use crate::upgrade::Client;
use serde_json::{Value, json};
use shadowbell_testing::programs::skipped;
use std::path::Path;

/// Export of the disk `data`.
const EXPORT: &str = "[[export]]\nid = \"e\"\ndisk = \"data\"\nnbd = \"unix:e.sock\"\n";

/// Read-only export of the disk `data`.
fn read_only() -> String {
    format!("{EXPORT}read-only = true\n")
}

/// Named disk.
fn named(id: &str, source: &str) -> String {
    format!("[[disk]]\nid = \"{id}\"\nsource = \"{source}\"\n")
}

/// Controller with a disk in memory, followed by `disks`.
fn controller(disks: &str) -> String {
    let socket = "[[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\n";
    format!("{socket}disks = [\"mem:4MiB\"{disks}]\n")
}

/// Configuration with the disk `data`, a controller with `disks`, and `rest`.
fn file(source: &str, disks: &str, rest: &str) -> String {
    [&named("data", source), &controller(disks), rest].concat()
}

/// Disk `name` with this NSID, for [`file`].
fn attached(name: &str, nsid: u32) -> String {
    format!(", {{ disk = \"{name}\", nsid = {nsid} }}")
}

fn apply(server: &Server, text: &str, options: &[&str]) -> (Option<i32>, String, String) {
    std::fs::write(server.directory().join("new.toml"), text).unwrap();
    ctl(server, &[&["apply", "new.toml"], options].concat())
}

/// Applies a file whose steps must all succeed without `--force`.
#[track_caller]
fn applied(server: &Server, text: &str) {
    let (code, _, errors) = apply(server, text, &[]);
    assert_eq!((code, &errors[..]), (Some(0), ""));
    let plan = ctl_json(server, &["apply", "new.toml", "--dry-run"]);
    assert_eq!((&plan["differences"], &plan["busy"]), (&json!([]), &json!([])), "{plan}");
}

/// Waits until no client is connected, and applies a file.
#[track_caller]
fn applied_without_clients(server: &Server, text: &str) {
    until("the disconnections", || {
        let is_idle = |words: &[&str], key: &str, idle: Value| {
            let all = ctl_json(server, words);
            all.as_array().unwrap().iter().all(|one| one[key] == idle)
        };
        is_idle(&["controllers"], "client", json!(false))
            && is_idle(&["export", "ls"], "queues", json!(0))
    });
    applied(server, text);
}

/// Applies a file that takes something from clients.
#[track_caller]
fn forced(server: &Server, text: &str, losses: &[&str]) {
    let (code, plan, _) = apply(server, text, &["--dry-run"]);
    assert_eq!(code, Some(0));
    let (code, _, errors) = apply(server, text, &[]);
    assert_eq!(code, Some(4), "{errors}");
    for loss in losses {
        assert!(plan.contains(loss) && errors.contains(loss), "{loss}: {plan}{errors}");
    }
    let (code, _, errors) = apply(server, text, &["--force"]);
    assert_eq!((code, &errors[..]), (Some(0), ""));
    applied(server, text);
}

/// Creates an image that is filled with `byte`.
fn filled(server: &Server, name: &str, byte: u8) {
    let path = image(server.directory(), name, 0);
    std::fs::write(path, vec![byte; (BLOCK * BLOCKS) as usize]).unwrap();
}

fn first_byte(server: &Server, name: &str) -> u8 {
    std::fs::read(server.directory().join(name)).unwrap()[0]
}

fn guest(server: &Server) -> Client {
    Client::attach(&server.directory().join("vm0.sock"))
}

fn reader(server: &Server) -> Nbd {
    Nbd::connect(&server.directory().join("e.sock"))
}

/// Source and limits of the disk `id`.
fn disk(server: &Server, id: &str) -> (String, Value) {
    let all = ctl_json(server, &["disk", "ls"]);
    let found = all.as_array().unwrap().iter().find(|disk| disk["id"] == id).unwrap();
    let source = found["source"].as_str().unwrap();
    let name = source.rsplit('/').next().unwrap().split('?').next().unwrap();
    (name.to_owned(), found["limits"].clone())
}

#[test]
fn a_disk_that_moves_gets_its_new_source() {
    let server =
        start(&file("disk.img", &attached("data", 2), &read_only()), &["vm0.sock", "e.sock"]);
    filled(&server, "other.img", 0);
    let (mut host, mut client) = (guest(&server), reader(&server));
    host.write(2, 0, 5);
    assert_eq!(client.read(), 5);
    let losses =
        ["the client of a would lose namespace 2", "the export e would lose the disk data"];

    // The new source is no image, so the disk is attached where it was.
    std::fs::write(server.directory().join("bad.img"), [0; 700]).unwrap();
    let bad = file("bad.img", &attached("data", 3), &read_only());
    let (code, _, errors) = apply(&server, &bad, &["--force"]);
    assert!(code != Some(0) && errors.contains("bad.img"), "{code:?} {errors}");
    drop(host);
    let mut host = guest(&server);
    assert_eq!((host.read(2, 0), reader(&server).read()), (5, 5));
    assert_eq!(disk(&server, "data").0, "disk.img");

    let client = reader(&server);
    forced(&server, &file("other.img", &attached("data", 3), &read_only()), &losses);
    drop((host, client));
    let mut host = guest(&server);
    assert_eq!(host.read(3, 0), 0, "the guest has the old image");
    host.write(3, 0, 7);
    assert_eq!(reader(&server).read(), 7);
    assert_eq!((first_byte(&server, "other.img"), first_byte(&server, "disk.img")), (7, 5));
    assert_eq!(disk(&server, "data").0, "other.img");

    // The disk moves to a new controller and gets the previous source again.
    drop(host);
    let other = "[[controller]]\nid = \"b\"\nsocket = \"vm1.sock\"\ndisks = [\"data\"]\n";
    applied_without_clients(&server, &file("disk.img", "", &format!("{other}{}", read_only())));
    let mut host = Client::attach(&server.directory().join("vm1.sock"));
    assert_eq!((host.read(1, 0), reader(&server).read()), (5, 5));
}

#[test]
fn a_disk_with_an_export_gets_its_new_source_in_place() {
    let text = |source| file(source, &attached("data", 2), &read_only());
    let server = start(&text("disk.img"), &["vm0.sock", "e.sock"]);
    filled(&server, "other.img", 9);
    let (mut host, mut client) = (guest(&server), reader(&server));
    host.write(2, 0, 5);
    assert_eq!(client.read(), 5);
    let losses =
        ["the client of a would lose the controller", "the export e would lose the disk data"];
    forced(&server, &text("other.img"), &losses);
    drop(host);
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (9, 9));

    // Another disk cannot be opened, so the controller and the disk are as before.
    let mut host = guest(&server);
    host.write(2, 0, 7);
    let disks = |bad| format!("{}{}", attached("data", 2), attached(bad, 3));
    std::fs::write(server.directory().join("bad.img"), [0; 700]).unwrap();
    let (code, _, errors) =
        apply(&server, &file("disk.img", &disks("bad.img"), &read_only()), &["--force"]);
    assert!(code != Some(0) && errors.contains("bad.img"), "{code:?} {errors}");
    drop(host);
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (7, 7));
    assert_eq!(disk(&server, "data").0, "other.img");
    // A change of limits stays, because it is no reason to lose the disk.
    let (code, _, errors) = apply(
        &server,
        &file("other.img?iops=900", &attached("data", 4), &read_only())
            .replace("\"vm0.sock\"", "\"missing/vm0.sock\""),
        &["--force"],
    );
    assert!(code != Some(0) && errors.contains("missing/vm0.sock"), "{code:?} {errors}");
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (7, 7));
    assert_eq!(disk(&server, "data").1["iops"], "900");
}

/// A controller is not removed if programs use a file of its disk, and then no other step of the
/// plan is carried out.
#[test]
fn a_mounted_file_of_a_controllers_disk_refuses_the_whole_plan() {
    let is_possible = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !is_possible {
        return skipped("this takes root and /dev/fuse");
    }
    let server = start(&file("disk.img", "", ""), &["vm0.sock"]);
    let path = server.directory().join("file");
    let _unmount = Unmount(path.clone());
    let add = ["export", "add", "f", "a/1", "--fuse", path.to_str().unwrap(), "--read-only"];
    assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
    let text = file("disk.img", "", "").replace("\"vm0.sock\"", "\"vm1.sock\"");
    let (code, _, errors) = apply(&server, &text.replace("\"data\"", "\"other\""), &["--force"]);
    assert!(code == Some(4) && errors.contains("nothing was changed"), "{code:?} {errors}");
    assert_eq!(disk(&server, "data").0, "disk.img");
    assert!(!server.directory().join("vm1.sock").exists());
}

#[test]
fn a_disk_changes_and_is_attached_or_detached_by_one_file() {
    let server = start(&file("disk.img", "", &read_only()), &["vm0.sock", "e.sock"]);
    filled(&server, "other.img", 9);
    // Another source, and an attachment.
    applied_without_clients(&server, &file("other.img", &attached("data", 2), &read_only()));
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (9, 9));
    // Another source, and a detachment.
    applied_without_clients(&server, &file("disk.img", "", &read_only()));
    assert_eq!((reader(&server).read(), disk(&server, "data").0), (0, "disk.img".to_owned()));
    // Other limits, with an attachment, a move and a detachment. The client stays connected.
    applied_without_clients(&server, &file("disk.img?iops=5000", "", &read_only()));
    let mut client = reader(&server);
    let steps = [("6000", attached("data", 2)), ("7000", attached("data", 3))];
    for (iops, disks) in steps.into_iter().chain([("8000", String::new())]) {
        applied(&server, &file(&format!("disk.img?iops={iops}"), &disks, &read_only()));
        assert_eq!(client.read(), 0);
        assert_eq!(disk(&server, "data").1["iops"], iops);
    }
    drop(client);
    // The export that writes the disk ends, and the disk is attached.
    applied_without_clients(&server, &file("disk.img", "", EXPORT));
    applied_without_clients(&server, &file("disk.img", &attached("data", 2), ""));
    applied_without_clients(&server, &file("disk.img", "", ""));
    // The image of a named disk becomes that of a disk without a name.
    applied_without_clients(&server, &controller(&attached("disk.img", 2)));
    assert_eq!(guest(&server).read(2, 0), 0);
    // Two disks swap their images.
    let two = |one: &str, two: &str, disks: &str| {
        file(one, disks, &[named("two", two), read_only()].concat())
    };
    applied_without_clients(&server, &two("disk.img", "other.img", &attached("two", 2)));
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (9, 0));
    applied_without_clients(&server, &two("other.img", "disk.img", &attached("two", 2)));
    assert_eq!((guest(&server).read(2, 0), reader(&server).read()), (0, 9));
}

#[test]
fn a_disk_of_a_subsystem_gets_its_new_source() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 1 << 20);
    let other = image(directory.path(), "other.img", 1 << 20);
    std::fs::write(other, vec![9; 1 << 20]).unwrap();
    let pair = |n: u32| {
        format!(
            "[[controller]]\nid = \"c{n}\"\nsocket = \"vm{n}.sock\"\nsubsystem = \"pair\"\n\
             disks = [\"data\"]\n"
        )
    };
    let subsystem = "[[subsystem]]\nname = \"pair\"\nstate = \"state\"\n";
    let text =
        |source| [&named("data", source), subsystem, &pair(0), &pair(1), &read_only()].concat();
    let server = serve_config(directory, &text("disk.img"));
    applied_without_clients(&server, &text("other.img"));
    for socket in ["vm0.sock", "vm1.sock"] {
        assert_eq!(Client::attach(&server.directory().join(socket)).read(1, 0), 9);
    }
    assert_eq!(reader(&server).read(), 9);
    // The last controller releases the disk, which stays open.
    applied_without_clients(&server, &file("disk.img", "", &read_only()));
    assert_eq!(reader(&server).read(), 0);
}
