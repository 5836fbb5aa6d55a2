//! Metrics of the server (`/metrics`), and the dashboard that shows them.

use crate::control::ctl;
use crate::harness::{Server, program, run, until};
use serde_json::Value;
use shadowbell_spec::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Parsed OpenMetrics 1.0 text: samples by name and labels as written.
pub(crate) struct Metrics {
    samples: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

impl Metrics {
    /// Parses a text. Panics at a violation of the specification.
    #[track_caller]
    fn parse(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("the text ends with EOF");
        let (mut samples, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        let mut said = BTreeSet::new();
        let mut family = String::new();
        for line in body.lines() {
            if let Some(about) = line.strip_prefix("# ") {
                let (what, rest) = about.split_once(' ').expect(line);
                let (name, value) = rest.split_once(' ').expect(line);
                assert!(said.insert((what.to_owned(), name.to_owned())), "twice: {line}");
                match what {
                    "TYPE" => {
                        assert!(is_name(name, true) && !name.ends_with("_total"), "{line}");
                        assert!(
                            ["counter", "gauge", "histogram", "info"].contains(&value),
                            "{line}"
                        );
                        // The metadata of a family come before its samples, which are contiguous.
                        assert!(kinds.insert(name.to_owned(), value.to_owned()).is_none());
                        family = name.to_owned();
                    }
                    "UNIT" => {
                        assert!(name == family && name.ends_with(&format!("_{value}")), "{line}");
                    }
                    "HELP" => {
                        assert!(name == family && value.ends_with('.'), "{line}");
                    }
                    _ => panic!("{line}"),
                }
                continue;
            }
            let (key, value) = line.rsplit_once(' ').expect(line);
            let name = key.split('{').next().unwrap();
            let suffix = match kinds[&family].as_str() {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            if kinds[&family] == "histogram" {
                let part = name.strip_prefix(&family).expect(line);
                assert!(["_bucket", "_count", "_sum"].contains(&part), "{line}");
                assert_eq!(part == "_bucket", key.contains(",le=\""), "{line}");
            } else {
                assert_eq!(name, format!("{family}{suffix}"), "{line}");
            }
            labels(&key[name.len()..]);
            let number: f64 = value.parse().expect(line);
            assert!(number.is_finite() && number >= 0.0, "{line}");
            assert!(suffix != "_info" || number == 1.0, "{line}");
            // Names use Prometheus's base units only.
            assert!(!["_ms", "_us", "_ns", "_kib", "_percent"].iter().any(|u| family.ends_with(u)));
            assert!(samples.insert(key.to_owned(), number).is_none(), "twice: {key}");
        }
        Self { samples, kinds }
    }

    #[track_caller]
    pub(crate) fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        let found: Vec<_> = self
            .samples
            .iter()
            .filter(|(key, _)| key.split('{').next() == Some(name))
            .filter(|(key, _)| labels.iter().all(|label| key.contains(label)))
            .collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
        *found[0].1
    }
}

fn is_name(name: &str, may_have_colon: bool) -> bool {
    let is = |c: char| c.is_ascii_alphanumeric() || c == '_' || (may_have_colon && c == ':');
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(is)
}

/// Checks the syntax of labels: `{name="value",...}`, or an empty text.
#[track_caller]
fn labels(text: &str) {
    if text.is_empty() {
        return;
    }
    let mut rest = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).expect(text);
    let mut names = BTreeSet::new();
    loop {
        let (name, value) = rest.split_once("=\"").expect(text);
        assert!(is_name(name, false) && names.insert(name), "{text}");
        let mut escaped = false;
        let end = value.find(|c| {
            let ends = c == '"' && !escaped;
            assert!(!escaped || "\"\\n".contains(c), "{text}");
            escaped = c == '\\' && !escaped;
            ends
        });
        rest = &value[end.expect(text) + 1..];
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return assert_eq!(rest, "", "{text}"),
        }
    }
}

/// Sends a GET request for this path. Returns head and body of the response.
fn get(stream: impl Read + Write, path: &str) -> (String, String) {
    get_of(stream, path, "host: localhost\r\n")
}

/// Sends a GET request with these headers. Returns head and body of the response.
fn get_of(mut stream: impl Read + Write, path: &str, headers: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\n{headers}connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    (head.to_owned(), body.to_owned())
}

pub(crate) fn scrape(server: &Server) -> Metrics {
    let socket = server.directory().join("run/vm/control.sock");
    let (head, body) = get(UnixStream::connect(socket).unwrap(), "/metrics");
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("openmetrics-text"), "{head}");
    Metrics::parse(&body)
}

#[test]
fn metrics_count_a_guests_commands() {
    let mut server = Server::start(&["mem:4MiB", "mem:4MiB?read-only=on"], &[]);
    let before = scrape(&server);
    assert_eq!(before.get("shadowbell_client_connected", &[]), 0.0);
    assert_eq!(before.get("shadowbell_io_commands_total", &[("kind", "read")]), 0.0);
    assert_eq!(before.get("shadowbell_namespace_size_bytes", &[("nsid", "1")]), 4194304.0);
    assert_eq!(before.get("shadowbell_namespace_read_only", &[("nsid", "2")]), 1.0);

    let mut guest = server.attach();
    let namespace = guest.namespace(1).unwrap().clone();
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    for _ in 0..100 {
        let done = run(&mut queue, namespace.read(0, 8).unwrap(), pool.take());
        assert_eq!(done.status, Status::SUCCESS);
    }
    let during = scrape(&server);
    let (reads, bytes) = ("shadowbell_io_commands_total", "shadowbell_io_bytes_total");
    assert_eq!(during.get(reads, &[("kind", "read")]), 100.0);
    assert_eq!(during.get(bytes, &[("kind", "read")]), 409600.0);
    assert_eq!(during.get("shadowbell_client_connected", &[]), 1.0);
    let commands = |metrics: &Metrics, queue| {
        metrics.get("shadowbell_queue_commands_total", &[("queue", queue)])
    };
    assert_eq!(commands(&during, "1") + commands(&during, "2"), 100.0);
    let polls = [("queue", "1"), ("side", "sq")];
    assert!(during.get("shadowbell_doorbell_polls_total", &polls) > 0.0);

    drop((queue, pool));
    guest.detach().unwrap();
    until("the client's disconnect", || {
        scrape(&server).get("shadowbell_client_connected", &[]) == 0.0
    });
    let after = scrape(&server);
    assert_eq!(commands(&after, "deleted"), 100.0, "what was counted is not lost");
    assert_eq!(after.get(reads, &[("kind", "read")]), 100.0);
    assert!(server.stop().success());
}

/// Buckets of a histogram with these labels, in order: upper bound and cumulative count.
fn buckets(metrics: &Metrics, name: &str, labels: &str) -> Vec<(f64, f64)> {
    let prefix = format!("{name}_bucket{{{labels},le=\"");
    let of = |(key, count): (&String, &f64)| {
        let end = key.strip_prefix(&prefix)?.strip_suffix("\"}")?;
        Some((if end == "+Inf" { f64::INFINITY } else { end.parse().unwrap() }, *count))
    };
    let mut buckets: Vec<_> = metrics.samples.iter().filter_map(of).collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    buckets
}

#[test]
fn namespace_latencies_are_measured_on_request() {
    let latency = "shadowbell_namespace_latency_seconds";
    let mut server = Server::start(&["mem:4MiB", "mem:4MiB"], &["--supervisor"]);
    let mut guest = server.attach();
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    let mut work = || {
        for _ in 0..100 {
            let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
            assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
        }
        for _ in 0..10 {
            let write = guest.namespace(2).unwrap().write(0, 8).unwrap();
            assert_eq!(run(&mut queue, write, pool.take()).status, Status::SUCCESS);
        }
    };
    work();
    assert!(!scrape(&server).kinds.contains_key(latency));
    assert_eq!(ctl(&server, &["measure"]).1, "off\n");
    // A second `measure on` changes nothing.
    for _ in 0..2 {
        assert_eq!(ctl(&server, &["measure", "on"]).1, "on\n");
        assert_eq!(crate::control::ctl_json(&server, &["measure"])["on"], true);
    }
    for round in 1..3 {
        work();
        let of = |metrics: &Metrics, what: &str, nsid, kind| {
            metrics.get(what, &[("nsid", nsid), ("kind", kind)])
        };
        // The test waits for the count, because the guest may receive the last completion before
        // the server counts it.
        let count = |metrics: &Metrics, nsid, kind| {
            of(metrics, "shadowbell_namespace_latency_seconds_count", nsid, kind)
        };
        until("all that is counted", || {
            count(&scrape(&server), "2", "write") == f64::from(round * 10)
        });
        let metrics = scrape(&server);
        assert_eq!(count(&metrics, "1", "read"), f64::from(round * 100));
        assert_eq!(count(&metrics, "1", "write") + count(&metrics, "2", "read"), 0.0);
        let bytes = "shadowbell_namespace_bytes_total";
        assert_eq!(of(&metrics, bytes, "1", "read"), f64::from(round * 100 * 4096));
        assert_eq!(of(&metrics, bytes, "2", "write"), f64::from(round * 10 * 4096));
        assert_eq!(of(&metrics, "shadowbell_namespace_errors_total", "1", "read"), 0.0);
        let sum = of(&metrics, "shadowbell_namespace_latency_seconds_sum", "1", "read");
        assert!(sum > 0.0 && sum < 20.0, "{sum}");
        let id = server.socket().display().to_string();
        let labels = format!("controller=\"{id}\",nsid=\"1\",kind=\"read\"");
        let buckets = buckets(&metrics, latency, &labels);
        assert_eq!(buckets.len(), 24, "{buckets:?}");
        assert!(buckets.is_sorted_by(|one, other| one.0 < other.0 && one.1 <= other.1));
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, f64::from(round * 100))));
        assert_eq!(buckets[0].0, 2.048e-6);
        if round == 1 {
            // The next process continues the measurement, with counters that begin at zero.
            let (status, _, errors) = ctl(&server, &["upgrade"]);
            assert_eq!(status, Some(0), "{errors}");
            until("measuring in the next process", || ctl(&server, &["measure"]).1 == "on\n");
            assert!(!scrape(&server).kinds.contains_key(latency));
            work();
        }
    }
    assert_eq!(ctl(&server, &["measure", "off"]).1, "off\n");
    work();
    assert_eq!(
        scrape(&server)
            .get("shadowbell_namespace_latency_seconds_count", &[("nsid", "1"), ("kind", "read")]),
        200.0
    );
    drop((queue, pool));
    drop(guest);
    assert!(server.stop().success());
}

#[test]
fn recoveries_count_crashes_and_not_upgrades() {
    let mut server = Server::start(&["mem:4MiB"], &["--supervisor"]);
    let mut guest = crate::upgrade::Client::attach(&server.socket());
    let recoveries = || scrape(&server).get("shadowbell_recoveries_total", &[]);
    assert_eq!(recoveries(), 0.0);
    for deaths in 1..3_u8 {
        crate::recover::kill(&server, rustix::process::Signal::KILL);
        guest.write(1, 0, deaths);
        until("the control socket", || ctl(&server, &["status"]).0 == Some(0));
        assert_eq!(recoveries(), f64::from(deaths));
    }
    let (status, _, errors) = ctl(&server, &["upgrade"]);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!((guest.read(1, 0), recoveries()), (2, 2.0));
    drop(guest);
    assert!(server.stop().success());
}

#[test]
fn the_tcp_endpoint_serves_only_metrics() {
    let mut server = Server::start(&["mem:4MiB"], &["--metrics", "127.0.0.1:0"]);
    let log = server.stderr();
    let address = log.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect(&log);
    let http_request = |path: &str| get(TcpStream::connect(address).unwrap(), path);
    let (head, body) = http_request("/metrics");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    Metrics::parse(&body);
    for path in ["/v1/status", "/v1/log-level", "/"] {
        assert!(http_request(path).0.starts_with("HTTP/1.1 404"), "{path}");
    }
    assert_eq!(ctl(&server, &["shutdown"]).0, Some(0));
    assert!(server.wait().success());

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let mut command = program();
    command.args(["serve", "mem:4MiB", "--socket", "x.sock", "--metrics", &taken]);
    command.current_dir(server.directory());
    command.env("SHADOWBELL_RUN_DIR", server.directory());
    let (status, _, complaint) = crate::harness::finish(command);
    assert!(status == Some(1) && complaint.contains("--metrics"), "{status:?}: {complaint}");
}

/// The TCP endpoint refuses requests whose host name is not allowed. This prevents DNS rebinding,
/// in which a web page makes its own name resolve to this machine.
#[test]
fn the_tcp_endpoint_responds_only_to_requests_that_address_this_machine() {
    let arguments = ["--metrics", "127.0.0.1:0", "--metrics-host", "node1.example"];
    let mut server = Server::start(&["mem:4MiB"], &arguments);
    let log = server.stderr();
    let address = log.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect(&log);
    let status = |headers: &str| {
        let (head, _) = get_of(TcpStream::connect(address).unwrap(), "/metrics", headers);
        head.split(' ').nth(1).map(str::to_owned).expect(&head)
    };
    let of = |host: &str| status(&format!("host: {host}\r\n"));
    for host in ["127.0.0.1:9", "10.0.0.1", "[::1]:80", "localhost", "LocalHost:1", "node1.example"]
    {
        assert_eq!(of(host), "200", "{host}");
    }
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "node1", ""]
    {
        assert_eq!(of(host), "400", "{host}");
    }
    assert_eq!(status(""), "400", "no host");
    assert_eq!(status("host: localhost\r\nhost: evil.example\r\n"), "400", "two hosts");
    // The control socket has access control, so it accepts any host name.
    let control = server.directory().join("run/vm/control.sock");
    let (head, _) = get_of(UnixStream::connect(control).unwrap(), "/metrics", "host: x\r\n");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");

    // When the maximum number of connections is reached, the oldest silent connection is closed for
    // a new client.
    let mut silent: Vec<_> = (0..16).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(of("localhost"), "200");
    let newest = silent.pop().unwrap();
    newest.set_nonblocking(true).unwrap();
    let error = (&newest).read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "the newest one is still open");
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0, "the oldest one was closed");
    assert_eq!(ctl(&server, &["shutdown"]).0, Some(0));
    assert!(server.wait().success());
}

#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let dashboard = std::fs::read(docs.join("grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_slice(&dashboard).unwrap();
    let alerts = std::fs::read_to_string(docs.join("alerts.yml")).unwrap();
    let server = Server::start(&["mem:4MiB"], &["--measure"]);
    let mut guest = server.attach();
    let mut queue = guest.take_queue_pair().unwrap();
    run(&mut queue, guest.namespace(1).unwrap().flush(), None);
    until("what is measured", || {
        scrape(&server).kinds.contains_key("shadowbell_namespace_latency_seconds")
    });
    let metrics = scrape(&server);
    let mut names: BTreeSet<String> = metrics.kinds.keys().cloned().collect();
    names.extend(metrics.kinds.iter().filter_map(|(name, kind)| match kind.as_str() {
        "counter" => Some(format!("{name}_total")),
        "info" => Some(format!("{name}_info")),
        "histogram" => Some(format!("{name}_bucket")),
        _ => None,
    }));
    let check = |expression: &str, place: &Value| {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = expression.split(|c| !is_word(c)).filter(|w| w.starts_with("shadowbell_"));
        words.inspect(|word| assert!(names.contains(*word), "{word} of {place}")).count()
    };
    let mut shown = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(panel["title"].is_string() && panel["gridPos"].is_object());
        for target in panel["targets"].as_array().into_iter().flatten() {
            shown += check(target["expr"].as_str().unwrap(), &panel["title"]);
        }
    }
    assert!(shown >= 10, "{shown}");
    let mut alerting = 0;
    for line in alerts.lines() {
        if let Some(expression) = line.trim().strip_prefix("expr: ") {
            alerting += check(expression, &line.into());
        } else if let Some(page) = line.trim().strip_prefix("runbook: ") {
            assert!(docs.join(page).is_file(), "{page}");
        }
    }
    assert!(alerting >= 8, "{alerting}");
}
