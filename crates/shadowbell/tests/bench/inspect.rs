//! `list`, `id-ctrl`, `id-ns`, `smart-log`, `error-log`, `get-feature`.

use crate::harness::{Server, json, line, output, shadowbell, stderr_of_failure};

#[test]
fn namespaces_are_listed() {
    let server = Server::start(&["mem:1MiB", "null:1TiB?block-size=4096", "--serial", "BENCH1"]);
    let report = json(&mut line(&format!("list {} local:mem:2MiB --json", server.target(1))));
    let devices = report["Devices"].as_array().unwrap();
    assert_eq!(devices.len(), 3);
    assert_eq!(devices[0]["Target"], server.target(1));
    assert_eq!(devices[0]["SerialNumber"], "BENCH1");
    assert_eq!(devices[0]["PhysicalSize"], 1 << 20);
    assert_eq!(devices[1]["Target"], server.target(2));
    assert_eq!((&devices[1]["NameSpace"], &devices[1]["SectorSize"]), (&2.into(), &4096.into()));
    assert_eq!(devices[2]["Target"], "local:mem:2MiB");

    // A socket path without a scheme is accepted.
    let text = output(&mut line(&format!("list {}", server.socket().display())));
    assert_eq!(text.lines().count(), 3, "{text}");
    for words in ["Target", "Serial", "BENCH1", "512 B + 0 B", "4096 B + 0 B", "1.0 TiB"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_controller_is_identified() {
    let controller = json(&mut line("id-ctrl local:mem:1MiB --json"));
    assert_eq!(controller["mdts"], 8);
    assert_eq!(controller["cntrltype"], 1);
    assert!(controller["oacs"].as_u64().unwrap() & 1 << 8 != 0, "shadow doorbells");
    let text = output(&mut line("id-ctrl local:mem:1MiB"));
    for words in
        ["vid ", "sn ", "mn ", "mdts ", "(1024 KiB)", "(shadow doorbells)", "subnqn", "ps0"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_namespace_is_identified() {
    let namespace = json(&mut line("id-ns local:mem:1MiB?block-size=4096 --json"));
    assert_eq!(namespace["nsze"], 256);
    assert_eq!(namespace["uuid"].as_str().unwrap().len(), 32);
    let text = output(&mut line("id-ns local:mem:1MiB?read-only=on"));
    for words in ["(1048576 bytes)", "(write protected)", "512 byte blocks", "(in use)"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let server = Server::start(&["mem:1MiB"]);
    let text = stderr_of_failure(&mut line(&format!("id-ns {}", server.target(3))), 2);
    assert!(text.contains("namespace 3"), "{text}");
}

#[test]
fn the_health_log_counts_reads() {
    let server = Server::start(&["mem:4MiB"]);
    let target = server.target(1);
    let reads = || {
        let log = json(&mut line(&format!("smart-log {target} --json")));
        assert_eq!(log["critical_warning"], 0);
        log["host_read_commands"].as_u64().unwrap()
    };
    let before = reads();
    json(&mut line(&format!("bench {target} --rw read --number-ios 100 --json")));
    assert_eq!(reads(), before + 100);
    let text = output(&mut line(&format!("smart-log {target}")));
    for words in ["critical_warning", "temperature", "degrees Celsius", "data_units_read"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_failed_command_is_in_the_error_log() {
    let server = Server::start(&["mem:1MiB"]);
    let target = server.target(1);
    // A feature identifier that no controller has.
    let text = stderr_of_failure(&mut line(&format!("get-feature {target} -f 0xc5")), 2);
    assert!(text.contains("0xc5"), "{text}");
    let log = json(&mut line(&format!("error-log {target} --json")));
    let errors = log["errors"].as_array().unwrap();
    assert!(!errors.is_empty());
    assert!(errors[0]["error_count"].as_u64().unwrap() > 0, "{log}");
    assert_eq!(errors[0]["sqid"], 0);
    let text = output(&mut line(&format!("error-log {target} -e 1")));
    for words in ["Entry[ 0]", "status_field", "Invalid Field in Command"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn features_are_shown() {
    let feature = json(&mut line("get-feature local:mem:1MiB -f 7 --json"));
    assert_eq!(feature["features"][0]["name"], "Number of Queues");
    assert!(feature["features"][0]["nsq"].as_u64().unwrap() >= 1);
    let all = json(&mut line("get-feature local:mem:1MiB --json"));
    let all = all["features"].as_array().unwrap();
    for name in ["Arbitration", "Temperature Threshold", "Timestamp", "Number of Queues"] {
        assert!(all.iter().any(|feature| feature["name"] == name), "{name}: {all:?}");
    }
    let text = output(&mut line("get-feature local:mem:1MiB -f 0x01 -s supported"));
    assert!(text.contains("Arbitration") && text.contains("changeable"), "{text}");
    let text = output(&mut line("get-feature local:mem:1MiB"));
    assert!(text.contains("get-feature: 0x01 (Arbitration), current value: 0x"), "{text}");
    let text = stderr_of_failure(&mut line("get-feature local:mem:1MiB -f 0x100"), 2);
    assert!(text.contains("too large"), "{text}");
}

#[test]
fn self_test_telemetry_and_persistent_event_log_are_read() {
    let server = Server::start(&["mem:1MiB"]);
    let target = server.target(1);
    let done = json(&mut line(&format!("device-self-test {target} -n 1 -s 1 -w --json")));
    assert_eq!(done["Current Device Self-Test Operation"], 0, "{done}");
    let log = json(&mut line(&format!("self-test-log {target} -o json")));
    let newest = &log["List of Valid Reports"][0];
    assert_eq!((&newest["Self test result"], &newest["Self test code"]), (&0.into(), &1.into()));
    let text = output(&mut line(&format!("self-test-log {target}")));
    assert!(text.contains("(passed)"), "{text}");
    stderr_of_failure(&mut line(&format!("device-self-test {target} -n 7")), 2);
    output(&mut line(&format!("device-self-test {target} -s 0xf")));

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("telemetry");
    output(&mut line(&format!("telemetry-log {target} -O {}", file.display())));
    let page = std::fs::read(&file).unwrap();
    assert!(page.len() >= 1024 && page.len().is_multiple_of(512) && page[0] == 7, "{}", page.len());
    assert!(page[512..].starts_with(b"shadowbell-telemetry 1\n"));
    output(&mut line(&format!("telemetry-log {target} -c -O {}", file.display())));
    assert_eq!(std::fs::read(&file).unwrap().len(), 512, "nothing has happened");

    let log = json(&mut line(&format!("persistent-event-log {target} --json")));
    let events = log["list_of_event_entries"].as_array().unwrap();
    assert_eq!(log["total_num_of_events"], events.len());
    // Each of the commands above has enabled the controller once.
    let enabled = events.iter().filter(|event| event["event_type"] == 4).count();
    assert!(enabled >= 6, "{log}");
    assert!(events.iter().any(|event| event["event_type"] == 12), "{log}");
    let text = output(&mut line(&format!("persistent-event-log {target}")));
    assert!(text.contains("Power-on or Reset"), "{text}");
}

#[test]
fn a_missing_socket_is_named_by_each_command() {
    for verb in [
        "list",
        "id-ctrl",
        "id-ns",
        "smart-log",
        "error-log",
        "get-feature",
        "device-self-test",
        "self-test-log",
        "persistent-event-log",
    ] {
        let text = stderr_of_failure(&mut line(&format!("{verb} vfio-user:/nowhere/vm0.sock")), 2);
        assert!(text.contains("/nowhere/vm0.sock"), "{text}");
        let text = stderr_of_failure(&mut line(&format!("{verb} nvme://ffff:ff:1f.7/1")), 2);
        assert!(text.contains("no PCI device ffff:ff:1f.7"), "{text}");
    }
}

/// A missing path is answered with the forms of a TARGET, and not with advice on creating a
/// disk.
#[test]
fn a_missing_path_is_answered_with_the_forms_of_a_target() {
    let directory = tempfile::tempdir().unwrap();
    let stderr_of_failure = |arguments: &[&str]| {
        stderr_of_failure(shadowbell(arguments).current_dir(directory.path()), 2)
    };
    for verb in ["list", "id-ctrl", "id-ns", "smart-log", "error-log", "get-feature", "bench"] {
        let text = stderr_of_failure(&[verb, "nosuch.sock"]);
        for words in [
            "nosuch.sock: there is no such file",
            "a TARGET is",
            "vfio-user:PATH",
            "`shadowbell serve DISK --socket nosuch.sock`",
        ] {
            assert!(text.contains(words), "{verb}: {words}: {text}");
        }
        assert!(!text.contains("truncate"), "{verb}: {text}");
    }
    let text = stderr_of_failure(&["smart-log", "nosuch.img"]);
    for words in
        ["nosuch.img: there is no such file", "a TARGET is", "`truncate -s 10G nosuch.img`"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    // `serve` expects a DISK, so its advice is how to create one.
    let mut serve = shadowbell(["serve", "nosuch.img", "--socket", "vm.sock"]);
    let text = self::stderr_of_failure(serve.current_dir(directory.path()), 1);
    assert!(text.contains("truncate") && !text.contains("TARGET"), "{text}");
}

#[test]
fn a_socket_given_as_a_disk_is_named_as_a_socket() {
    let server = Server::start(&["mem:1MiB", "mem:2MiB"]);
    let socket = server.socket().display().to_string();
    // The socket is given without the scheme `vfio-user:`.
    let namespace = json(&mut shadowbell(["id-ns", &format!("{socket}/2"), "--json"]));
    assert_eq!(namespace["nsze"], 4096);
    let local = format!("local:{socket}");
    let other = server.directory.path().join("other.sock").display().to_string();
    for arguments in [&["smart-log", &local][..], &["serve", &socket, "--socket", &other]] {
        let text = stderr_of_failure(&mut shadowbell(arguments), 2);
        let words =
            format!("{socket}: it is a socket; the controller behind it is `vfio-user:{socket}`");
        assert!(text.contains(&words), "{text}");
    }
    let text = stderr_of_failure(
        &mut shadowbell(["serve", &format!("{socket}/2"), "--socket", &other]),
        2,
    );
    let words = format!(
        "{socket} is a socket; namespace 2 of the controller behind it is `vfio-user:{socket}/2`"
    );
    assert!(text.contains(&words), "{text}");
}
