use super::write::{Settings, write};
use super::*;
use crate::server_config::Own;
use shadowbell_controller::Polling;

fn parse_error(text: &str) -> String {
    parse(text, "vms.toml").map(|_| ()).unwrap_err()
}

#[test]
fn images_of_read_only_disks_and_controllers_are_only_read() {
    let text = r#"
        [[controller]]
        socket = "/run/vm0.sock"
        disks = ["a.img", "b.img?read-only=on", "mem:1MiB"]
        [[controller]]
        socket = "/run/vm1.sock"
        disks = ["c.img"]
        read-only = true
    "#;
    let config = parse(text, "vms.toml").unwrap();
    let images: Vec<_> = config.images().collect();
    let expected = [("a.img", false), ("b.img", true), ("c.img", true)];
    assert_eq!(images, expected.map(|(path, is_read_only)| (path.into(), is_read_only)));
}

#[test]
fn every_setting_is_parsed() {
    let text = r#"
        trace = "/var/tmp/trace"
        trace-records = 4096
        workers = 3
        poll = "never"

        [[controller]]
        socket = "/run/vm0.sock"
        disks = ["vm0.img", { disk = "mem:1GiB", uuid = "0190163d-8694-739b-aea5-966c26f8ad91" }]

        [[controller]]
        socket = "/run/vm1.sock"
        disks = ["/dev/vg/vm1"]
        serial = "VM1"
        model = "A model"
        doorbells = "mapped"
        queues = 16
        queue-entries = 1024
        max-transfer = "2MiB"
        read-only = true
        worker = 2

        [[controller]]
        socket = "/run/vm2.sock"
        disks = ["mem:1MiB"]
        worker = "own"
    "#;
    let config = parse(text, "vms.toml").unwrap();
    assert_eq!(config.trace, Some(("/var/tmp/trace".into(), 4096)));
    assert_eq!((config.pool.workers, config.pool.polling), (3, Polling::Never));
    let [first, second, third] = &config.controllers[..] else { panic!("{config:?}") };
    assert_eq!(first.socket, Path::new("/run/vm0.sock"));
    assert_eq!(first.origin.as_deref(), Some("vms.toml:7"));
    assert_eq!(first.controller.disks[0], DiskConfig::of("vm0.img"));
    assert_eq!(first.controller.disks[1].uuid.unwrap()[..3], [0x01, 0x90, 0x16]);
    assert_eq!(first.controller.doorbells, OfferedDoorbells::Shadow);
    let expected = ControllerConfig {
        serial: Some("VM1".into()),
        model: Some("A model".into()),
        queues: Some(16),
        queue_entries: Some(1024),
        max_transfer: Some(2 << 20),
        doorbells: OfferedDoorbells::Mapped,
        read_only: true,
        ..ControllerConfig::of(&["/dev/vg/vm1"])
    };
    assert_eq!(second.controller, expected);
    let workers = [first, second, third].map(|controller| controller.worker);
    let own = WorkerChoice::Own(Own::Own);
    assert_eq!(workers, [None, Some(WorkerChoice::Shared(2)), Some(own)]);
}

#[test]
fn an_error_is_reported_with_its_line() {
    let ok = "[[controller]]\nsocket = \"/run/a\"\ndisks = [\"mem:1MiB\"]\n";
    parse(ok, "x").unwrap();
    for (text, words) in [
        ("", "vms.toml:1: it has no controller"),
        ("workers = 1\nnonsense", "vms.toml:2: "),
        ("workers = \"many\"", "vms.toml:1: it is a text, \"many\", expected a whole number"),
        ("\nworkres = 1", "vms.toml:2: unknown field `workres`"),
        (
            "[[controller]]\nsocket = \"/run/a\"",
            "vms.toml:2: a controller has one disk at least, or a `pool`",
        ),
        (
            "[[controller]]\nsocket = 7\ndisks = []",
            "vms.toml:2: it is a number, `7`, expected a path in quotes",
        ),
        ("[[controller]]\nsocket = \"a\"\ndisks = []", "vms.toml:3: a controller has one disk"),
        ("[[controller]]\nsocket = \"a\"\n\ndisks = [7]", "vms.toml:4: a disk is a string"),
        (
            "[[controller]]\nsocket = \"a\"\ndisks = [{ disk = \"b\", nsid = 2 }, { disk = \"c\", nsid = 2 }]",
            "vms.toml:3: the `nsid` of each disk is 1 to 256",
        ),
        ("[[controller]]\nsocket = \"\"\ndisks = [\"a\"]", "vms.toml:2: the path of the socket"),
        (&format!("{ok}queues = 65"), "vms.toml:4: `queues` is 1 to 64, not 65"),
        (&format!("{ok}\nqueue-entries = 1"), "vms.toml:5: `queue-entries` is 2 to 4096, not 1"),
        (&format!("{ok}queues = -1"), "vms.toml:4: it is `-1`, expected a whole number"),
        (&format!("{ok}max-transfer = \"big\""), "vms.toml:4: `max-transfer`"),
        (&format!("{ok}worker = \"mine\""), "vms.toml:4: `worker` is the number of a worker"),
        (&format!("workers = 2\n{ok}worker = 2"), "vms.toml:5: `worker` is 2, and there are 2"),
        (&format!("{ok}worker = 0"), "vms.toml:4: `worker` is 0, and the number of I/O threads"),
        (&format!("{ok}doorbells = \"loud\""), "vms.toml:4: unknown variant `loud`"),
        (&format!("workers = 0\n{ok}"), "vms.toml:1: `workers` is 1 to 190, not 0"),
        (&format!("poll = \"never\"\npoll-max-us = 5\n{ok}"), "vms.toml:2: a maximum polling time"),
        (
            &format!("[[limit-group]]\nname = \"a\"\n[[limit-group]]\nname = \"a\"\n{ok}"),
            "vms.toml:4: the limit group `a` is defined twice",
        ),
        (&format!("[[limit-group]]\nname = \"a\"\niops = 0\n{ok}"), "vms.toml:3: "),
        (
            "[[disk]]\nid = \"d\"\nsource = \"mem:1MiB\"\n[[controller]]\nsocket = \"/c\"\n\
             disks = [\n\"d\",\n\"d\"]\n",
            "vms.toml:8: the controller has the disk `d` twice",
        ),
        (
            &ok.replace("1MiB", "1MiB?limit-group=b"),
            "vms.toml:3: there is no `[[limit-group]]` `b`",
        ),
        (
            &format!(
                "{ok}[[export]]\nid = \"e\"\ndisk = \"/run/a/1\"\nnbd = \"unix:/e\"\n\
                 read-only = true\nowner = [0, 0]"
            ),
            "vms.toml:9: `mounted` and `owner` are no keys",
        ),
        (
            &format!("{ok}[[export]]\nid = \"e\"\ndisk = \"/run/a/1\"\nnbd = \"unix:/e\"\n"),
            "vms.toml:6: the disk `/run/a/1` is written by namespace 1 of /run/a: give one",
        ),
        (&format!("pin = [1000000]\n{ok}"), "vms.toml:1: this process has no processor"),
        (
            "[[controller]]\nsocket = \"a\"\ndisks = [\n  \"x\",\n  { disk = \"y\", uuid = \"z\" },\n]",
            "vms.toml:5: `z` is no UUID",
        ),
        (
            &format!("{ok}{ok}"),
            "vms.toml:5: the socket /run/a is that of another controller too (line 2)",
        ),
        (
            &format!("{ok}serial = \"S\"\n{}serial = \"S\"\n", ok.replace("/a", "/b")),
            "vms.toml:8: the serial number \"S\" is that of another controller too (line 4)",
        ),
    ] {
        let error = parse_error(text);
        assert!(error.starts_with(words), "{text}\n{error}");
    }
}

#[test]
fn all_errors_are_reported_in_order() {
    let text = "workers = 999\n[[controller]]\nsocket = \"a\"\ndisks = []\nqueues = 0\n";
    let error = parse_error(text);
    let lines: Vec<_> = error.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(lines, ["vms.toml:1:", "vms.toml:4:", "vms.toml:5:"]);
}

#[test]
fn only_uuids_in_groups_are_parsed() {
    assert!(parse_uuid("0190163D-8694-739b-aea5-966c26f8ad91").is_some());
    for text in [
        "",
        "0190163d8694739baea5966c26f8ad91",
        "0190163d-8694-739b-aea5-966c26f8ad9",
        "0190163d-8694-739b-aea5-966c26f8ad9g",
        "+190163d-8694-739b-aea5-966c26f8ad91",
        "00000000-0000-0000-0000-000000000000",
    ] {
        assert_eq!(parse_uuid(text), None, "{text}");
    }
}

#[test]
fn a_written_file_parses_to_the_same_configuration() {
    let text = r#"
        name = "vms"
        trace = "/var/tmp/trace"
        metrics = "127.0.0.1:9477"
        metrics-hosts = ["node1.example"]
        socket-mode = "0660"
        socket-group = "root"
        pin = [0]
        poll-max-us = 7

        [[controller]]
        id = "a"
        socket = "vm0.sock"
        disks = [
            "vm0.img?direct=on",
            { disk = "mem:1GiB", uuid = "0190163d-8694-739b-aea5-966c26f8ad91" },
            { disk = "null:1GiB", nsid = 7 },
            "file:a%3F.img",
        ]

        [[controller]]
        socket = "/run/vm1.sock"
        disks = [{ disk = "/dev/vg/vm1", nsid = 2 }]
        serial = "VM1"
        model = "A model"
        doorbells = "mapped"
        queues = 16
        queue-entries = 1024
        max-transfer = "2MiB"
        read-only = true
        worker = "own"
    "#;
    let config = parse(text, "vms.toml").unwrap();
    let asked: Vec<_> = config.controllers.iter().cloned().map(std::sync::Arc::new).collect();
    let written = write(&Settings::of(&config), "vms", &[], &asked, &[]);
    assert!(!written.contains("[]"), "{written}");
    let again = parse(&written, "written.toml").unwrap();
    for (one, other) in config.controllers.iter().zip(&again.controllers) {
        assert!(one.is_same(other) && one.id() == other.id(), "{written}");
        assert_eq!(one.controller.disks.len(), other.controller.disks.len());
    }
    let pool =
        |config: &ServerConfig| (config.pool.workers, config.pool.polling, config.pool.pin.clone());
    assert_eq!((again.controllers.len(), pool(&again)), (2, pool(&config)));
    assert_eq!((&again.trace, again.metrics), (&config.trace, config.metrics));
    assert_eq!(again.metrics_hosts, ["node1.example"]);
    assert_eq!(again.socket_access.mode, Some(0o660));
    assert_eq!(again.socket_access, config.socket_access);
    assert_eq!(again.control.name.as_deref(), Some("vms"));
    let once_more: Vec<_> = again.controllers.iter().cloned().map(std::sync::Arc::new).collect();
    assert_eq!(write(&Settings::of(&again), "vms", &[], &once_more, &[]), written);
    // A setting that was changed at run time is written too.
    assert!(!again.measure);
    let measured = write(&Settings::of(&again).with_measure(true), "vms", &[], &once_more, &[]);
    assert!(parse(&measured, "measured.toml").unwrap().measure, "{measured}");
}

#[test]
fn mapped_doorbells_imply_polling_by_default() {
    let text = |first: &str, how: &str| {
        format!(
            "{first}\n[[controller]]\nsocket = \"a\"\ndisks = [\"mem:1MiB\"]\ndoorbells = \"{how}\""
        )
    };
    for (first, how, polling) in [
        ("", "mapped", Polling::Always),
        ("", "shadow", Polling::default()),
        ("poll = \"adaptive\"", "mapped", Polling::default()),
        ("poll-max-us = 7", "mapped", Polling::Adaptive(std::time::Duration::from_micros(7))),
        ("poll = \"never\"", "mapped", Polling::Never),
    ] {
        let config = parse(&text(first, how), "x").unwrap();
        assert_eq!(config.pool.polling, polling, "{first} {how}");
        assert_eq!(config.polls_for_mapped, (first, how) == ("", "mapped"));
    }
    for (line, words) in [
        ("socket-mode = \"rw\"", "x:1: `socket-mode`"),
        ("socket-group = \"nix, nobody\"", "x:1: `socket-group`"),
    ] {
        let error = parse(&text(line, "shadow"), "x").map(|_| ()).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    }
}

#[test]
fn unset_settings_contradict_nothing() {
    let of = |lines: &str| {
        let text = format!("{lines}\n[[controller]]\nsocket = \"a\"\ndisks = [\"mem:1MiB\"]\n");
        Settings::of(&parse(&text, "vms.toml").unwrap())
    };
    let said = [
        "workers = 1",
        "poll = \"never\"",
        "pin = [0]",
        "trace = \"t\"",
        "measure = true",
        "control-socket = \"c\"",
        "metrics = \"127.0.0.1:9\"",
        "socket-mode = \"0660\"",
        "socket-group = \"0\"",
    ];
    let all = of(&said.join("\n"));
    for line in said {
        let key = line.split(' ').next().unwrap();
        let found = of(line).contradictions(&of(""));
        assert!(found.iter().any(|found| found == key), "{line}: {found:?}");
        assert!(of(line).contradictions(&all).is_empty(), "{line}");
    }
    assert!(of("").contradictions(&all).is_empty());
}

#[test]
fn users_of_a_read_only_disk_are_no_writers() {
    for word in ["on", "true", "yes"] {
        let text = format!(
            "[[disk]]\nid = \"d\"\nsource = \"/b.img\"\noptions = {{ read-only = \"{word}\" }}\n\
             [[controller]]\nid = \"a\"\nsocket = \"/run/a\"\n\
             disks = [\"/a.img?read-only={word}\"]\n\
             [[export]]\nid = \"e\"\ndisk = \"a/1\"\nnbd = \"unix:/e\"\n\
             [[export]]\nid = \"f\"\ndisk = \"d\"\nnbd = \"unix:/f\"\n\
             [[export]]\nid = \"g\"\ndisk = \"d\"\nnbd = \"unix:/g\"\n"
        );
        assert_eq!(parse(&text, "vms.toml").map(|config| config.exports.len()), Ok(3));
    }
}

#[test]
fn controllers_of_a_subsystem_get_cntlids_in_order() {
    let text = r#"
        [[subsystem]]
        name = "pair"
        state = "/srv/pair"
        serial = "PAIR"

        [[controller]]
        socket = "/run/a"
        disks = ["/srv/a.img"]
        subsystem = "pair"

        [[controller]]
        socket = "/run/alone"
        disks = ["mem:1MiB"]

        [[controller]]
        socket = "/run/b"
        disks = ["/srv/a.img"]
        subsystem = "pair"
    "#;
    let config = parse(text, "x").unwrap();
    let places = config.controllers.iter().map(|served| served.controller.subsystem.as_ref());
    let places: Vec<_> =
        places.map(|place| place.map(|place| (&place.name[..], place.cntlid))).collect();
    assert_eq!(places, [Some(("pair", 1)), None, Some(("pair", 2))]);
    // Parsing the written file yields the same configuration.
    let served: Vec<_> = config.controllers.iter().cloned().map(std::sync::Arc::new).collect();
    let again = write(&Settings::of(&config), "x", &[], &served, &[]);
    let again = parse(&again, "x").unwrap();
    let all = |config: &ServerConfig| {
        config.controllers.iter().map(|one| one.controller.clone()).collect::<Vec<_>>()
    };
    assert_eq!(all(&again), all(&config));
    // Both controllers of the subsystem share the disk; that is no conflict.
    let twice = crate::server_config::duplicate_disk(&config.controllers);
    assert_eq!(twice, None);

    let refused = |from: &str, to: &str| {
        assert!(text.contains(from));
        parse(&text.replacen(from, to, 1), "x").unwrap_err()
    };
    let last = "socket = \"/run/b\"\n        disks = [\"/srv/a.img\"]";
    for (from, to, words) in [
        ("subsystem = \"pair\"", "subsystem = \"par\"", "x:10: there is no `[[subsystem]]` `par`"),
        (last, "socket = \"/run/b\"\n        disks = [\"/srv/b.img\"]", "the same `disks`"),
        (last, &format!("{last}\n        serial = \"B\""), "the serial number of the subsystem"),
        ("name = \"pair\"", "name = \"a pair\"", "x:3: `a pair` is no name"),
        ("state = \"/srv/pair\"", "state = \"\"", "x:4: the path of `state` is empty"),
        ("state = \"/srv/pair\"", "stat = \"/srv/pair\"", "unknown field `stat`"),
        (
            "[[controller]]",
            "[[subsystem]]\nname = \"pair\"\nstate = \"/srv/other\"\n[[controller]]",
            "x:8: the subsystem `pair` is defined twice",
        ),
        (
            "[[controller]]",
            "[[subsystem]]\nname = \"other\"\nstate = \"/srv/pair\"\n[[controller]]",
            "x:9: the file /srv/pair is that of another subsystem, too",
        ),
    ] {
        let why = refused(from, to);
        assert!(why.contains(words), "{why}");
    }
}

#[test]
fn ana_groups_and_states_belong_to_a_subsystem() {
    let text = r#"
        [[subsystem]]
        name = "pair"
        state = "/srv/pair"
        ana-groups = [[1], [2]]

        [[controller]]
        socket = "/run/a"
        disks = ["/srv/a.img", "/srv/b.img", "/srv/c.img"]
        subsystem = "pair"
        ana = ["inaccessible", "change"]

        [[controller]]
        socket = "/run/b"
        disks = ["/srv/a.img", "/srv/b.img", "/srv/c.img"]
        subsystem = "pair"
        ana = "non-optimized"
    "#;
    let config = parse(text, "x").unwrap();
    let texts = |config: &ServerConfig| {
        let all = config.controllers.iter().map(|one| one.controller.subsystem.clone().unwrap());
        all.map(|place| (place.ana.nsids.clone(), place.ana.text().unwrap())).collect::<Vec<_>>()
    };
    let nsids = vec![vec![1], vec![2]];
    let states = ["inaccessible, change", "non-optimized, non-optimized"];
    assert_eq!(texts(&config), states.map(|states| (nsids.clone(), states.to_owned())));
    let served: Vec<_> = config.controllers.iter().cloned().map(std::sync::Arc::new).collect();
    let again = write(&Settings::of(&config), "x", &[], &served, &[]);
    assert_eq!(texts(&parse(&again, "x").unwrap()), texts(&config));
    for (from, to, words) in [
        ("[[1], [2]]", "[[1], [1]]", "x:10: `ana-groups` has namespace 1 twice"),
        ("[[1], [2]]", "[[1], [4]]", "namespace 4, which does not exist"),
        ("[\"inaccessible\", \"change\"]", "\"best\"", "`ana` is `optimized`, `non-optimized`"),
        ("\"change\"]", "\"change\", \"change\"]", "x:10: `ana` has 3 states, and there are 2"),
        ("subsystem = \"pair\"", "", "x:11: `ana` is only for a controller with a `subsystem`"),
    ] {
        assert!(text.contains(from));
        let why = parse(&text.replacen(from, to, 1), "x").unwrap_err();
        assert!(why.contains(words), "{why}");
    }
}

#[test]
fn a_missing_image_of_two_controllers_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.toml");
    let controller = |n| format!("[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"no.img\"]\n");
    std::fs::write(&path, controller(0) + &controller(1)).unwrap();
    let error = check(&path, &|_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("no.img: it is named as a disk of"), "{error}");
    std::fs::write(&path, controller(0)).unwrap();
    check(&path, &|_| Ok(())).unwrap();
}
