//! Controllers that are added and removed while a server runs.

use crate::control::{ctl, ctl_json};
use crate::harness::{Server, attach, finish, image, program, run, until};
use shadowbell_driver::{AttachOptions, Controller};
use shadowbell_spec::Status;
use std::os::unix::net::UnixStream;

fn read(guest: &mut Controller) -> Status {
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    run(&mut queue, guest.namespace(1).unwrap().read(0, 8).unwrap(), pool.take()).status
}

fn attached(server: &Server, socket: &str) -> Controller {
    attach(&server.directory().join(socket), &AttachOptions::default())
}

#[test]
fn a_controller_is_added_and_removed_beside_a_guest() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    image(server.directory(), "b.img", 8 << 20);
    let mut guest = server.attach();
    let add = ["controller", "add", "b", "b.img", "--socket", "b.sock"];
    assert_eq!(ctl_json(&server, &add)[0]["id"], "b");
    // The same request again, as after a lost response: it succeeds and changes nothing.
    assert_eq!(ctl_json(&server, &add)[0]["id"], "b");
    let (code, _, errors) = ctl(&server, &[&add[..], &["--read-only"]].concat());
    assert!(
        code == Some(4) && errors.contains("exists already, with other properties"),
        "{errors}"
    );
    for (id, disk, socket, status, words) in [
        ("c", "b.img", "c.sock", 4, "b.img: this server has it open as the disk b/1"),
        ("c", "c.img", "c.sock", 2, "c.img"),
        ("c", "mem:1MiB", "vm.sock", 2, "in use by a running server"),
        ("c/d", "mem:1MiB", "c.sock", 2, "is no id"),
        ("c", "mem:1MiB?x=y", "c.sock", 2, "option `x`"),
    ] {
        let (code, _, errors) = ctl(&server, &["controller", "add", id, disk, "--socket", socket]);
        assert!(code == Some(status) && errors.contains(words), "{code:?} {id} {disk}: {errors}");
        assert!(!server.directory().join("c.sock").exists());
    }
    let mut other = attached(&server, "b.sock");
    assert_eq!((read(&mut guest), read(&mut other)), (Status::SUCCESS, Status::SUCCESS));
    let (code, _, errors) = ctl(&server, &["controller", "remove", "b"]);
    assert!(code == Some(4) && errors.contains("b would lose the controller"), "{errors}");
    drop(other);
    until("the client's disconnect", || {
        ctl_json(&server, &["controllers", "b"])[0]["client"] == false
    });
    assert_eq!(ctl(&server, &["controller", "remove", "b"]).0, Some(0));
    assert!(!server.directory().join("b.sock").exists());
    let (code, _, errors) = ctl(&server, &["controller", "remove", "b"]);
    assert!(code == Some(3) && errors.contains("there is no controller `b`"), "{errors}");
    // The disk of a removed controller can be used by another controller.
    assert_eq!(
        ctl_json(&server, &["controller", "add", "d", "b.img", "--socket", "d.sock"])[0]["id"],
        "d"
    );
    let _stays = attached(&server, "d.sock");
    until("the client", || ctl_json(&server, &["status"])["clients"] == 2);
    assert_eq!(ctl(&server, &["controller", "remove", "d.sock", "--force"]).0, Some(0));
    server.wait_for_log("d.sock: the client has left");
    assert_eq!(ctl_json(&server, &["status"])["controllers"], 1);
    assert_eq!(read(&mut guest), Status::SUCCESS);
    drop(guest);
    assert!(server.stop().success());
}

#[test]
fn an_added_controller_survives_upgrades() {
    let mut server = Server::start(&["mem:4MiB"], &["--supervisor"]);
    let add = ["controller", "add", "b", "mem:8MiB", "--socket", "b.sock"];
    ctl_json(&server, &add);
    let mut guest = attached(&server, "b.sock");
    for _ in 0..2 {
        let before = ctl_json(&server, &["status"])["pid"].clone();
        let (code, _, errors) = ctl(&server, &["upgrade"]);
        assert_eq!(code, Some(0), "{errors}\n{}", server.stderr());
        assert_ne!(ctl_json(&server, &["status"])["pid"], before);
        assert_eq!(
            ctl_json(&server, &add)[0]["client"],
            true,
            "the controller and its client survive"
        );
    }
    assert_eq!(read(&mut guest), Status::SUCCESS);
    drop(guest);
    until("the client's disconnect", || ctl_json(&server, &["status"])["clients"] == 0);
    assert_eq!(ctl(&server, &["controller", "remove", "b"]).0, Some(0));
    assert_eq!(ctl(&server, &["upgrade"]).0, Some(0));
    assert_eq!(ctl_json(&server, &["status"])["controllers"], 1);
    drop(server.attach());
    assert!(server.stop().success());
}

#[test]
fn a_file_is_applied_as_a_whole_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["0", "1", "2"] {
        image(directory.path(), &format!("{name}.img"), 4 << 20);
    }
    let write = |directory: &std::path::Path, vms: &[(&str, &str)]| {
        let vms = vms.iter().map(|(name, disk)| {
            format!(
                "[[controller]]\nid = \"{name}\"\nsocket = \"{name}.sock\"\ndisks = [\"{disk}\"]\n"
            )
        });
        std::fs::write(directory.join("vms.toml"), vms.collect::<String>()).unwrap();
    };
    write(directory.path(), &[("vm0", "0.img"), ("vm1", "1.img")]);
    let mut command = program();
    command.args(["serve", "--config", "vms.toml", "--name", "vm"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock", "vm1.sock"]);
    let ids = || {
        let all = ctl_json(&server, &["controllers"]);
        let ids = all.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    let mut guest = attached(&server, "vm0.sock");
    let plan = ctl_json(&server, &["apply", "vms.toml"]);
    assert_eq!((&plan["unchanged"], &plan["applied"]), (&2.into(), &true.into()));

    // In the new file, vm2 has the disk of vm1, vm1 is removed, and vm3 is new.
    write(server.directory(), &[("vm0", "0.img"), ("vm2", "1.img"), ("vm3", "2.img")]);
    let (code, printed, _) = ctl(&server, &["apply", "vms.toml", "--dry-run"]);
    assert_eq!(code, Some(0));
    assert_eq!(
        printed,
        "+ vm2\n+ vm3\n- vm1\ncontrollers: 2 added, 1 removed, 0 replaced, 0 changed, 1 unchanged; not applied\n"
    );
    assert_eq!(ids(), ["vm0", "vm1"]);
    // The request is repeated: the test's own connection to vm1 may still count as a client.
    until("vm1 has no client", || ctl(&server, &["apply", "vms.toml"]).0 == Some(0));
    assert_eq!(ids(), ["vm0", "vm3", "vm2"]);
    assert!(UnixStream::connect(server.directory().join("vm1.sock")).is_err());
    drop(attached(&server, "vm2.sock"));

    // If any part of the file is invalid, nothing is changed.
    write(server.directory(), &[("vm0", "0.img"), ("vm4", "mem:1MiB"), ("vm5", "no.img")]);
    let (code, _, errors) = ctl(&server, &["apply", "vms.toml"]);
    assert!(code == Some(2) && errors.contains("nothing was changed"), "{code:?} {errors}");
    // The disk of vm2 stays open until vm2 is removed, so it could be opened only afterwards.
    for bad in ["1.img?iopz=7", "gone.img"] {
        write(server.directory(), &[("vm0", "0.img"), ("vm3", "2.img"), ("vm2", bad)]);
        for options in [&["--dry-run"][..], &[]] {
            let (code, _, errors) = ctl(&server, &[&["apply", "vms.toml"], options].concat());
            let word = bad.rsplit('?').next().unwrap().split('=').next().unwrap();
            let is_refused = errors.contains("nothing was changed") && errors.contains(word);
            assert!(code == Some(2) && is_refused, "{code:?} {errors}");
        }
    }
    assert_eq!(ids(), ["vm0", "vm3", "vm2"]);
    write(server.directory(), &[("vm0", "0.img"), ("vm0", "mem:1MiB")]);
    let (code, _, errors) = ctl(&server, &["apply", "vms.toml"]);
    assert!(code == Some(2) && errors.contains("vms.toml:"), "{code:?} {errors}");
    // A controller with a client is not removed without `--force`.
    write(server.directory(), &[("vm0", "mem:1MiB"), ("vm3", "2.img"), ("vm2", "1.img")]);
    let (code, printed, _) = ctl(&server, &["apply", "vms.toml", "--dry-run"]);
    let image = server.directory().canonicalize().unwrap().join("0.img");
    let expected = format!(
        "~ vm0 (has a client)\n    namespace 1: {} -> mem:1MiB\n\
         needs --force: the client of vm0 would lose the controller\n\
         controllers: 0 added, 0 removed, 1 replaced, 0 changed, 2 unchanged; not applied\n",
        image.display()
    );
    assert_eq!((code, printed), (Some(0), expected));
    let (code, _, errors) = ctl(&server, &["apply", "vms.toml"]);
    assert!(code == Some(4) && errors.contains("client of vm0 would lose"), "{code:?} {errors}");
    assert_eq!(ids(), ["vm0", "vm3", "vm2"]);
    assert_eq!(read(&mut guest), Status::SUCCESS, "the guest has not noticed");
    assert_eq!(ctl(&server, &["apply", "vms.toml", "--force"]).0, Some(0));
    drop(guest);
    let mut guest = attached(&server, "vm0.sock");
    assert_eq!(guest.namespace(1).unwrap().bytes(), 1 << 20);
    assert_eq!(read(&mut guest), Status::SUCCESS);
    drop(guest);
    assert!(server.stop().success());
}

/// Namespaces and limits change while the guest is attached, without removing its controller.
#[test]
fn applying_namespaces_and_limits_keeps_the_controller() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        image(directory.path(), &format!("{name}.img"), 4 << 20);
    }
    let write = |directory: &std::path::Path, limit: &str, disks: &str, rest: &str| {
        let text = format!(
            "[[limit-group]]\nname = \"db\"\n{limit}\n[[controller]]\nid = \"vm0\"\n\
             socket = \"vm0.sock\"\ndisks = [{disks}]\n{rest}"
        );
        std::fs::write(directory.join("vms.toml"), text).unwrap();
    };
    write(directory.path(), "", "\"mem:4MiB\", \"a.img\"", "");
    let mut command = program();
    command.args(["serve", "--config", "vms.toml", "--name", "vm"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock"]);
    let mut guest = attached(&server, "vm0.sock");
    let apply = |arguments: &[&str]| ctl(&server, &[&["apply", "vms.toml"], arguments].concat());
    let disks = || {
        let all = ctl_json(&server, &["namespaces"]);
        let disk = |one: &serde_json::Value| {
            let (nsid, disk) = (&one["nsid"], one["disk"].as_str().unwrap());
            let (read_only, limits) = (&one["read_only"], &one["limits"]["group"]);
            format!("{nsid} {} {read_only} {limits}", disk.rsplit('/').next().unwrap())
        };
        all.as_array().unwrap().iter().map(disk).collect::<Vec<_>>()
    };

    // Adds a namespace, makes one read-only, and puts one into a limit group.
    let more = "\"mem:4MiB?limit-group=db\", \"a.img?read-only=on\", \"b.img\"";
    write(server.directory(), "iops = \"5000\"", more, "");
    let (code, printed, errors) = apply(&["--dry-run"]);
    let at = server.directory().canonicalize().unwrap().display().to_string();
    let expected = format!(
        "* vm0 (has a client)\n    namespace 1: mem:4MiB -> mem:4MiB?limit-group=db\n    \
         namespace 2: {at}/a.img -> {at}/a.img?read-only=on\n    \
         namespace 3: none -> {at}/b.img\n\
         * limit group db: none -> iops=5000\n\
         needs --force: the client of vm0 could not write namespace 2 any more\n\
         controllers: 0 added, 0 removed, 0 replaced, 1 changed, 0 unchanged; not applied\n"
    );
    assert_eq!((code, &printed[..], &errors[..]), (Some(0), &expected[..], ""));
    assert_eq!(disks(), ["1 mem:4MiB false null", "2 a.img false null"]);
    let plan = ctl_json(&server, &["apply", "vms.toml", "--force"]);
    assert_eq!(
        (&plan["change"], &plan["busy"]),
        (&serde_json::json!(["vm0"]), &serde_json::json!(["vm0"]))
    );
    let now = ["1 mem:4MiB false \"db\"", "2 a.img true null", "3 b.img false null"];
    assert_eq!(disks(), now);
    assert_eq!(ctl_json(&server, &["limit-group", "ls"])[0]["limits"]["iops"], "5000");
    assert_eq!(
        ctl_json(&server, &["apply", "vms.toml"])["unchanged"],
        1,
        "the file is already applied"
    );
    let client = || ctl_json(&server, &["controllers", "vm0"])[0]["client"] == true;
    assert!(client() && read(&mut guest) == Status::SUCCESS);

    // A disk that cannot be opened leaves all namespaces and limits unchanged.
    let bad = "\"mem:4MiB\", \"a.img\", \"b.img\", \"no.img\"";
    write(server.directory(), "iops = \"7\"", bad, "");
    let (code, _, errors) = apply(&[]);
    assert!(code == Some(2) && errors.contains("nothing was changed"), "{code:?} {errors}");
    assert_eq!(disks(), now);
    assert_eq!(ctl_json(&server, &["limit-group", "ls"])[0]["limits"]["iops"], "5000");

    // Without `--force`, a namespace is not removed while a client is attached. After its removal,
    // the disk can be attached with another NSID.
    write(server.directory(), "", "\"mem:4MiB\", { disk = \"a.img\", nsid = 5 }", "");
    let (code, _, errors) = apply(&[]);
    let words =
        "the client of vm0 would lose namespace 2; the client of vm0 would lose namespace 3";
    assert!(code == Some(4) && errors.contains(words), "{code:?} {errors}");
    let (code, printed, errors) = apply(&["--force"]);
    assert!(code == Some(0) && printed.contains("namespace 5: none ->"), "{printed}{errors}");
    assert_eq!(disks(), ["1 mem:4MiB false null", "5 a.img false null"]);
    assert!(
        client() && ctl_json(&server, &["limit-group", "ls"])[0]["limits"] == serde_json::json!({})
    );

    // A limit group that the file does not have is removed.
    assert_eq!(ctl(&server, &["limit-group", "add", "old", "--iops", "7"]).0, Some(0));
    let (code, printed, _) = apply(&["--dry-run"]);
    assert!(code == Some(0) && printed.contains("* limit group old: iops=7 -> none"), "{printed}");
    assert_eq!(apply(&[]).0, Some(0));
    let groups = ctl_json(&server, &["limit-group", "ls"]);
    assert_eq!(groups.as_array().unwrap().len(), 1, "{groups}");

    // Server-wide settings cannot change at run time. The output reports this.
    let text = std::fs::read_to_string(server.directory().join("vms.toml")).unwrap();
    std::fs::write(server.directory().join("vms.toml"), format!("workers = 2\n{text}")).unwrap();
    let (_, printed, _) = apply(&[]);
    assert!(printed.starts_with("server-wide settings differ (workers); "), "{printed}");
    drop(guest);
    assert!(server.stop().success());
}

#[test]
fn check_validates_a_file_without_opening_disks() {
    let directory = tempfile::tempdir().unwrap();
    let check = |text: &str| {
        let path = directory.path().join("vms.toml");
        std::fs::write(&path, text).unwrap();
        let mut command = program();
        command.args(["config", "check"]).arg(&path);
        let checked = finish(command);
        // `serve --check` does the same.
        let mut command = program();
        command.args(["serve", "--check"]).arg(&path);
        assert_eq!(finish(command), checked);
        checked
    };
    let twice = image(directory.path(), "twice.img", 1 << 20).display().to_string();
    let there = format!("{twice}\", \"{twice}");
    let controller = |disk: &str| {
        format!("[[controller]]\nid = \"a\"\nsocket = \"a.sock\"\ndisks = [\"{disk}\"]\n")
    };
    let (code, printed, errors) = check(&controller("no.img"));
    assert_eq!((code, &errors[..]), (Some(0), "warning: no.img: there is no such file\n"));
    assert!(printed.ends_with("vms.toml: 1 controller\n"), "{printed}");
    for (text, words) in [
        (controller("x.img?frobnicate=on"), "frobnicate"),
        (controller("vfio-user:"), "lacks a socket"),
        (controller("a.img").replace("\"a\"", "\"a b\""), "vms.toml:2: `a b` is no id"),
        (controller("a.img").repeat(2), "vms.toml:"),
        ("workers = 0\n".to_owned(), "vms.toml:1"),
        // Each error names the line of the configuration key that is wrong.
        (controller("no:x"), "vms.toml:4:"),
        (controller("mem:1"), "vms.toml:4:"),
        (controller("a.img") + "serial = \"123456789012345678901\"\n", "vms.toml:5: the serial"),
        (controller("a.img") + "model = \"\"\n", "vms.toml:5: the model number"),
        (controller("a.img") + "max-transfer = \"3MiB\"\n", "vms.toml:5: `max-transfer`"),
        (controller(&there), "vms.toml:4: "),
        (controller("a.img?limit-group=db"), "vms.toml:4: there is no `[[limit-group]]` `db`"),
        (controller("a.img").replace("a.sock", "no/a.sock"), "vms.toml:3: socket path "),
        (controller("a.img") + "[paths]\nallow = [\n\"/\",\n\"/no\"]\n", "vms.toml:8: --allow /no"),
        (
            format!("trace = \"no/t\"\n{}", controller("a.img")),
            "vms.toml:1: --trace: no/t is in no",
        ),
        (
            controller("a.img")
                + "[[export]]\nid = \"e\"\ndisk = \"a/1\"\nread-only = true\n\
                   nbd = \"unix:/e\"\ntls-certificates = \"/no\"\n",
            "vms.toml:10: ",
        ),
        ("[[disk]]\nid = \"d\"\nsource = \"no:x\"\n".to_owned() + &controller("d"), "vms.toml:3: "),
    ] {
        let (code, _, errors) = check(&text);
        assert!(code == Some(2) && errors.contains(words), "{code:?} {text}: {errors}");
    }
    assert!(!directory.path().join("a.sock").exists());
}

/// A server starts without controllers, like the service of the Debian package. A controller is
/// added later through the control socket.
#[test]
fn a_server_starts_without_controllers_and_gets_them_later() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("vms.toml"), "controller = []\n").unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vms.toml", "--allow", "."]);
    let mut server = Server::spawn(command, directory, &["run/vms/control.sock"]);
    assert_eq!(ctl_json(&server, &["status"])["controllers"], 0);
    let save = |name: &str| {
        assert_eq!(ctl(&server, &["save-config", name]).0, Some(0));
        std::fs::read_to_string(server.directory().join(name)).unwrap()
    };
    let saved = save("none.toml");
    assert!(saved.contains("controller = []"), "{saved}");
    assert_eq!(ctl(&server, &["apply", "none.toml"]).0, Some(0));
    let add = ["controller", "add", "vm0", "mem:1MiB", "--socket", "vm0.sock"];
    assert_eq!(ctl(&server, &add).0, Some(0));
    let elsewhere = tempfile::tempdir().unwrap();
    let socket = elsewhere.path().join("vm1.sock");
    let add = ["controller", "add", "vm1", "mem:1MiB", "--socket", socket.to_str().unwrap()];
    let (code, _, errors) = ctl(&server, &add);
    assert_eq!(code, Some(0), "{errors}");
    // A new controller of an applied file is at a path that the server was not started with.
    let applied = elsewhere.path().join("vm2.sock");
    let disk = "disks = [{ disk = \"mem:1MiB\" }]";
    let text = format!("{}\n[[controller]]\nsocket = {applied:?}\n{disk}\n", save("all.toml"));
    std::fs::write(server.directory().join("more.toml"), text).unwrap();
    let (code, _, errors) = ctl(&server, &["apply", "more.toml"]);
    assert!(code == Some(0) && applied.exists(), "{errors}");
    let options = AttachOptions { queue_pairs: 2, ..AttachOptions::default() };
    let mut guest = attach(&server.directory().join("vm0.sock"), &options);
    assert_eq!(read(&mut guest), Status::SUCCESS);
    // An empty file may be a mistake, so applying it is refused and removes no controller.
    std::fs::write(server.directory().join("vms.toml"), "").unwrap();
    let (code, _, errors) = ctl(&server, &["apply", "vms.toml", "--force"]);
    assert!(code == Some(2) && errors.contains("or write `controller = []`"), "{errors}");
    assert_eq!(read(&mut guest), Status::SUCCESS);
    drop(guest);
    until("its controller goes", || ctl(&server, &["apply", "none.toml"]).0 == Some(0));
    assert_eq!(ctl_json(&server, &["status"])["controllers"], 0);
    assert!(server.stop().success());
}
