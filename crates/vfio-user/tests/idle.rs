//! Many silent clients cost no CPU time. The test is a program of its own, because it measures the
//! cost of the whole process.

mod common;

use std::time::Duration;

use common::*;
use shadowbell_vfio_user::server::Limits;

/// Voluntary and involuntary context switches of the reactor's thread, and its CPU time.
fn cost() -> (u64, u64) {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        if std::fs::read_to_string(task.join("comm")).unwrap().trim() != "reactor" {
            continue;
        }
        let status = std::fs::read_to_string(task.join("status")).unwrap();
        let switches = status
            .lines()
            .filter(|line| line.contains("voluntary_ctxt_switches"))
            .map(|line| line.split_whitespace().last().unwrap().parse::<u64>().unwrap())
            .sum();
        let times = std::fs::read_to_string(task.join("schedstat")).unwrap();
        return (switches, times.split_whitespace().next().unwrap().parse().unwrap());
    }
    panic!("there is no reactor");
}

#[test]
fn two_hundred_and_fifty_six_idle_devices_cost_no_processor_time() {
    let server = Server::start(Limits::default());
    let ports: Vec<_> = (0..256).map(|n| server.add(&format!("device{n}"))).collect();
    // Every second device has a client.
    let mut clients: Vec<_> = ports.iter().step_by(2).map(|(path, ..)| Raw::attach(path)).collect();
    for client in &mut clients {
        client.write(0, &[1]).ok();
    }
    // This client waits until the first client of the device disconnects.
    let _waiting = Raw::connect(&ports[0].0);
    // The measurement is repeated until earlier work has ended.
    let mut before = cost();
    eventually("a second costs nothing", || {
        before = cost();
        // Interval of the measurement. A periodic timer or polling would use CPU time in it.
        std::thread::sleep(Duration::from_secs(1));
        cost() == before
    });
    // The server still serves the clients.
    for client in &mut clients {
        client.write(0, &[1]).ok();
    }
    assert_ne!(cost(), before);
}
