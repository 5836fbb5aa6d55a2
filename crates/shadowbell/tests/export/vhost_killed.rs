//! A virtio disk whose process is killed, and a machine that notices nothing.

use crate::killed::Service;
use crate::machine::{BLOCK, BLOCKS, Machine};
use shadowbell_state::AbortPoint;
use shadowbell_testing::wait::{LIMIT, until};
use std::time::{Duration, Instant};

/// A machine that runs, and the processes that serve it.
struct Running {
    service: Service,
    machine: Machine,
}

impl Running {
    fn start(variables: &[(&str, &str)]) -> Self {
        let arguments = ["--vhost-user-blk", "DIR/vm.sock", "--queues=1"];
        let service = Service::start(BLOCK * BLOCKS, &arguments, variables);
        let mut running = Self { service, machine: Machine::new() };
        running.connect();
        running
    }

    /// The process may die meanwhile, of what it finds.
    fn connect(&mut self) {
        let socket = self.service.path("vm.sock");
        if let Err(error) = self.machine.connect(&socket) {
            until(&format!("a death, after {error}"), || self.service.has_died());
        }
    }

    /// Another process serves the machine, the one before being dead.
    fn again(&mut self, variables: &[(&str, &str)]) {
        self.service.again(variables);
        self.connect();
    }

    /// Lets it run until so many requests were answered, or the process dies. Whether it died.
    fn run(&mut self, requests: u64) -> Result<bool, String> {
        let until = self.machine.answered + requests;
        let mut since = (self.machine.answered, Instant::now());
        loop {
            self.machine.look()?;
            if self.machine.answered >= until {
                return Ok(false);
            }
            self.machine.ask();
            if self.machine.wait() || since.0 != self.machine.answered {
                since = (self.machine.answered, Instant::now());
            } else if self.service.has_died() {
                // What was answered before its death counts.
                self.machine.look()?;
                return Ok(true);
            } else if since.1.elapsed() > LIMIT {
                return Err("a request is lost".to_owned());
            }
        }
    }

    /// Lets all requests end.
    fn finish(&mut self) -> Result<(), String> {
        let since = Instant::now();
        while !self.machine.is_idle() {
            self.machine.wait();
            self.machine.look()?;
            if since.elapsed() > LIMIT {
                return Err("a request is lost".to_owned());
            }
        }
        Ok(())
    }

    /// Nothing was lost, and the image holds what the machine has written.
    fn end(mut self) -> Result<(), String> {
        self.run(500)?;
        self.finish()?;
        let Self { service, mut machine } = self;
        let directory = service.stop();
        machine.look()?;
        let image = std::fs::read(directory.path().join("disk.img")).unwrap();
        if image != machine.image() {
            return Err("the image holds something else".to_owned());
        }
        Ok(())
    }
}

/// A machine whose device dies at each of these points, some time.
fn die_at(points: &[(AbortPoint, u32)], more: &[(&str, &str)]) -> Result<(), String> {
    let mut running = Running::start(more);
    running.run(100)?;
    running.service.kill();
    for (point, nth) in points {
        let at = format!("{}:{nth}", point.name());
        let mut variables = vec![("SHADOWBELL_ABORT_AT", at.as_str())];
        variables.extend(more);
        running.again(&variables);
        if !running.run(100_000)? {
            return Err(format!("it has not died at {at}"));
        }
    }
    running.again(more);
    running.end()
}

const POINTS: [AbortPoint; 8] = [
    AbortPoint::RequestTaken,
    AbortPoint::RequestNumbered,
    AbortPoint::RequestMarked,
    AbortPoint::RequestEnded,
    AbortPoint::RequestListed,
    AbortPoint::RequestUsed,
    AbortPoint::RequestFreed,
    AbortPoint::RequestAnswered,
];

#[test]
fn its_process_may_die_at_each_step_of_a_request() {
    let points = POINTS.into_iter().flat_map(|point| [1, 7, 40].map(|nth| (point, nth)));
    let points: Vec<_> = points.collect();
    die_at(&points, &[]).unwrap();
}

#[test]
fn a_wrong_order_is_found() {
    for (order, point) in [
        ("freed-before-posted", AbortPoint::RequestListed),
        ("stored-before-freed", AbortPoint::RequestFreed),
    ] {
        // What is done twice may happen to be the request that comes next.
        let points: Vec<_> = (1..=30).map(|nth| (point, nth)).collect();
        let found = die_at(&points, &[("SHADOWBELL_WRONG_ORDER", order)]);
        println!("{order}: {found:?}");
        assert!(found.is_err(), "{order} is as good as the right one");
    }
}

#[test]
fn it_may_be_killed_at_any_moment() {
    let mut running = Running::start(&[]);
    for moment in [0, 3, 50, 17, 1, 8, 130, 29, 5, 77] {
        running.run(20 + 13 * moment).unwrap();
        // Whatever it is doing now.
        running.machine.ask();
        // Random moment: any is good.
        std::thread::sleep(Duration::from_micros(37 * moment));
        running.service.kill();
        running.again(&[]);
    }
    running.end().unwrap();
}

/// A machine that is paused has nothing in flight at the disk, and goes on.
#[test]
fn it_may_be_paused_and_its_process_replaced_meanwhile() {
    let mut running = Running::start(&[]);
    for _ in 0..3 {
        running.run(50).unwrap();
        running.machine.pause();
        running.machine.look().unwrap();
        running.service.kill();
        running.again(&[]);
        running.run(50).unwrap();
        // The VMM connects again to the same process.
        running.connect();
    }
    running.end().unwrap();
}
