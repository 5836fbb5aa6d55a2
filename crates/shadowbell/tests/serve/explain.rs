//! `shadowbell explain`: what the guest of a controller waits for.

use crate::control::{ctl, ctl_json};
use crate::disk_recovery::Export;
use crate::harness::{Server, finish, program, run, until};
use crate::supervisor::children;
use rustix::process::Signal;
use serde_json::Value;
use shadowbell_driver::{BufferPool, Controller, Namespace, QueuePair};
use shadowbell_spec::Status;

/// A guest of the first namespace.
struct Guest {
    controller: Controller,
    queue: QueuePair,
    pool: BufferPool,
    namespace: Namespace,
}

impl Guest {
    fn attach(server: &Server) -> Self {
        let mut controller = server.attach();
        let queue = controller.take_queue_pair().unwrap();
        let namespace = controller.namespace(1).unwrap().clone();
        let pool = controller.buffers(32, 4096).unwrap();
        Self { controller, queue, pool, namespace }
    }

    /// Submits reads of 4 KiB.
    fn submit(&mut self, count: usize) {
        for _ in 0..count {
            let read = self.namespace.read(0, 8).unwrap();
            self.queue.submit(read, self.pool.take()).unwrap();
        }
        self.queue.ring().unwrap();
    }
}

fn share(explanation: &Value, cause: &str) -> f64 {
    explanation["shares"][cause].as_f64().unwrap()
}

fn sentences(explanation: &Value) -> [&str; 3] {
    let all = explanation["sentences"].as_array().unwrap().iter();
    let all: Vec<_> = all.map(|one| one.as_str().unwrap()).collect();
    all.try_into().unwrap()
}

/// True if the server has the thread of the sampler.
fn samples(server: &Server) -> bool {
    let pid = children(server.pid()).first().copied().unwrap_or(server.pid());
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.flatten().any(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        name.trim() == "sb-waits"
    })
}

#[test]
fn a_guest_at_its_limits_is_told_from_an_idle_one() {
    let mut server = Server::start(&["mem:4MiB?iops=1"], &[]);
    let explanation = ctl_json(&server, &["explain"]);
    assert!(sentences(&explanation)[0].contains("has no client"), "{explanation}");
    let mut guest = Guest::attach(&server);
    // The first second may contain the attach of the driver.
    until("an idle guest", || {
        let explanation = ctl_json(&server, &["explain"]);
        sentences(&explanation)[0].contains("waits for nothing")
            && share(&explanation, "nothing") > 0.5
    });

    guest.submit(32);
    let socket = server.socket().display().to_string();
    let mut explanation = Value::Null;
    until("a guest at its limits", || {
        explanation = ctl_json(&server, &["explain", &socket]);
        share(&explanation, "limit") > 0.5
    });
    assert_eq!(explanation["controller"], Value::from(&socket[..]));
    assert!(explanation["in_flight"].as_u64().unwrap() > 16, "{explanation}");
    let limited = explanation["disks"][0]["limited"].as_u64().unwrap();
    assert!(limited > 16, "{explanation}");
    let [cause, figures, advice] = sentences(&explanation);
    assert!(cause.contains("waits for the rate limits"), "{cause}");
    assert!(figures.contains(" at the rate limits."), "{figures}");
    assert!(advice.contains("iops=1") && advice.contains(&format!("{socket}/1")), "{advice}");

    // The text is the three sentences, also by the name of the socket and without `ctl`.
    let mut command = program();
    command.args(["explain", &socket]).current_dir(server.directory());
    command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    let (status, text, errors) = finish(command);
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.starts_with(&format!("{socket} waits for the rate limits")), "{text}");

    // `top` has the same source.
    let mut command = program();
    command.arg("top").arg(server.directory().join("run/vm/control.sock"));
    command.args(["--count", "1", "--interval", "500ms"]);
    let (status, text, errors) = finish(command);
    assert_eq!(status, Some(0), "{errors}");
    assert!(text.contains("Waits for") && text.contains("limit "), "{text}");

    let (status, _, errors) = ctl(&server, &["explain", "nope"]);
    assert_eq!(status, Some(3), "{errors}");
    assert!(errors.contains("there is no controller `nope`"), "{errors}");

    // Without a reader, there is no sampler.
    until("the sampler", || {
        ctl_json(&server, &["explain", &socket]);
        samples(&server)
    });
    until("the end of the sampler", || !samples(&server));
    drop((guest.queue, guest.pool));
    guest.controller.detach().unwrap();
    assert!(server.stop().success());
}

#[test]
fn hung_storage_is_the_cause_with_its_age() {
    let storage = Export::start("mem:16MiB");
    let options = ["--supervisor", "--workers", "1", "--stalled-after", "1"];
    let mut server = Server::start(&[&storage.uri("&settle=50ms")], &options);
    let mut guest = Guest::attach(&server);
    let read = guest.namespace.read(0, 8).unwrap();
    assert_eq!(run(&mut guest.queue, read, guest.pool.take()).status, Status::SUCCESS);
    storage.stall();
    guest.submit(3);
    let mut explanation = Value::Null;
    until("a stalled disk", || {
        explanation = ctl_json(&server, &["explain"]);
        explanation["disks"][0]["stalled"] == true
    });
    assert!(share(&explanation, "disk") > 0.5, "{explanation}");
    let [cause, figures, advice] = sentences(&explanation);
    assert!(cause.contains("is stalled: the oldest request has had no answer for "), "{cause}");
    assert!(
        figures.contains("0 commands per second") && figures.contains("3 in flight"),
        "{figures}"
    );
    assert!(advice.contains("nbd+unix:") && advice.contains("the 3 requests"), "{advice}");
    storage.signal(Signal::CONT);
    until("the end of the stall", || {
        while guest.queue.pop().is_some() {}
        ctl_json(&server, &["disk", "ls"])[0]["stalled"] == false
    });
    drop((guest.queue, guest.pool));
    guest.controller.detach().unwrap();
    assert!(server.stop().success());
}
