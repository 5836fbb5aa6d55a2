//! A panic of an I/O thread ends the whole process. Otherwise other threads would wait forever for
//! the I/O thread that has panicked.

mod common;

use common::Host;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_disk::{Disk, DiskInfo, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::Sqe;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

const CHILD: &str = "PANIC_TEST_CHILD";

/// Disk with a bug: its queue panics on each request.
#[derive(Debug)]
struct PanickingDisk;

impl Disk for PanickingDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo::new(512, 1024)
    }

    fn queue(&self) -> std::io::Result<Box<dyn Queue>> {
        Ok(Box::new(Self))
    }

    fn name(&self) -> String {
        "broken".into()
    }
}

impl Queue for PanickingDisk {
    fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
        panic!("a mistake");
    }
}

#[test]
fn a_disk_whose_queue_panics_ends_the_process() {
    if std::env::var_os(CHILD).is_some() {
        let pool = Pool::start(&PoolOptions { workers: 1, ..Default::default() }).unwrap();
        let namespaces = vec![NamespaceConfig { disk: Arc::new(PanickingDisk), uuid: [7; 16] }];
        let config = Config { namespaces, ..Config::default() };
        let controller = Controller::new(config, pool, Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.enable();
        let mut queue = host.create(1, 8, false);
        let read = Sqe::new(0x02, 0, 1).with_prps(host.alloc(4096), 0);
        host.run(&mut queue, read);
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_disk_whose_queue_panics_ends_the_process", "--nocapture"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "{:?}: {printed}", output.status);
    assert!(printed.contains("a mistake"), "{printed}");
    assert!(printed.contains("thread sb-worker0 has panicked"), "{printed}");
}
