//! A virtio disk whose device process is killed, without an error in the machine.

use crate::killed::{Image, Service, kills_of_each};
use crate::machine::{BLOCK, BLOCKS, Machine};
use shadowbell_testing::wait::{LIMIT, until};
use std::time::{Duration, Instant};

/// A running machine, and the processes that serve it.
struct Running {
    image: Image,
    service: Service,
    machine: Machine,
}

impl Running {
    fn start(image: Image) -> Self {
        let arguments = ["--vhost-user-blk", "DIR/vm.sock", "--queues=1"];
        let service = Service::start_on(image, BLOCK * BLOCKS, &arguments, &[]);
        let mut running = Self { image, service, machine: Machine::new() };
        running.connect();
        running
    }

    /// Connects to the device process. If the process dies during recovery, waits for its death.
    fn connect(&mut self) {
        let socket = self.service.path("vm.sock");
        if let Err(error) = self.machine.connect(&socket) {
            until(&format!("a death, after {error}"), || self.service.has_died());
        }
    }

    /// Starts the next device process after the death of the previous one, and connects.
    fn restart(&mut self) {
        self.service.restart(&[]);
        self.connect();
    }

    /// Runs the machine until `requests` more requests have completed, or the device process has
    /// died. Returns true if it has died.
    fn run(&mut self, requests: u64) -> Result<bool, String> {
        let until = self.machine.answered + requests;
        let mut since = (self.machine.answered, Instant::now());
        loop {
            self.machine.check_completions()?;
            if self.machine.answered >= until {
                return Ok(false);
            }
            self.machine.submit_requests();
            if self.machine.wait() || since.0 != self.machine.answered {
                since = (self.machine.answered, Instant::now());
            } else if self.service.has_died() {
                // Requests that were completed before the death are checked as well.
                self.machine.check_completions()?;
                return Ok(true);
            } else if since.1.elapsed() > LIMIT {
                return Err("a request is lost".to_owned());
            }
        }
    }

    /// Waits for all requests in flight.
    fn finish(&mut self) -> Result<(), String> {
        let since = Instant::now();
        while !self.machine.is_idle() {
            self.machine.wait();
            self.machine.check_completions()?;
            if since.elapsed() > LIMIT {
                return Err("a request is lost".to_owned());
            }
        }
        Ok(())
    }

    /// Checks that no request was lost and that the image holds the written data.
    fn end(mut self) -> Result<(), String> {
        self.run(500)?;
        self.finish()?;
        let Self { image, service, mut machine } = self;
        let directory = service.stop();
        machine.check_completions()?;
        if image.content(directory.path()) != machine.image() {
            return Err("the image holds something else".to_owned());
        }
        Ok(())
    }
}

#[test]
fn a_vhost_process_may_be_killed_at_any_moment() {
    let moments = [0, 3, 50, 17, 1, 8, 130, 29, 5, 77];
    let kills = kills_of_each(Image::all().len(), moments.len());
    for image in Image::all() {
        let mut running = Running::start(*image);
        for moment in moments.into_iter().cycle().take(kills) {
            running.run(20 + 13 * moment).unwrap();
            // Requests are in flight at the kill.
            running.machine.submit_requests();
            // The kill comes at an arbitrary moment.
            std::thread::sleep(Duration::from_micros(37 * moment));
            running.service.kill();
            running.restart();
        }
        running.end().unwrap();
    }
}

/// A paused machine has no request in flight, so it can resume with another device process.
#[test]
fn a_paused_machine_resumes_with_a_new_vhost_process() {
    let mut running = Running::start(Image::Raw);
    for _ in 0..3 {
        running.run(50).unwrap();
        running.machine.pause();
        running.machine.check_completions().unwrap();
        running.service.kill();
        running.restart();
        running.run(50).unwrap();
        // The VMM reconnects to the same process.
        running.connect();
    }
    running.end().unwrap();
}
