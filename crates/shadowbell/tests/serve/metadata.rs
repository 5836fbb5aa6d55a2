//! Namespaces with metadata and protection information: their survival of crashes and upgrades, and
//! the place of the metadata in the storage.

use crate::harness::{Server, finish, image, program, run};
use crate::recover::kill;
use crate::upgrade::upgrade;
use rustix::process::Signal;
use shadowbell_driver::{AttachOptions, Command, Controller, QueuePair};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::{PRINFO_GUARD, PRINFO_PRACT};
use shadowbell_spec::opcode::NvmOpcode;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

/// Host of namespaces with blocks of 512 bytes. The host transfers no metadata: the controller
/// inserts and strips the protection information.
struct Guest(Controller, QueuePair);

impl Guest {
    fn attach(server: &Server) -> Self {
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let mut controller = server.attach_with(&options);
        let queue = controller.take_queue_pair().unwrap();
        Self(controller, queue)
    }

    fn transfer(&mut self, nsid: u32, op: NvmOpcode, lba: u64, fill: u8) -> Result<u8, Status> {
        let mut buffer = self.0.buffers(1, 4096).unwrap().take().unwrap();
        buffer.fill(fill);
        let prinfo = u32::from(PRINFO_PRACT | PRINFO_GUARD) << 26;
        let dwords = [lba as u32, 0, prinfo, 0];
        let command = Command::raw(op as u8, nsid, dwords, 512);
        let done = run(&mut self.1, command, Some(buffer));
        done.status.into_result().map(|()| done.buffer.unwrap().to_vec(1)[0])
    }

    #[track_caller]
    fn write(&mut self, nsid: u32, lba: u64, fill: u8) {
        self.transfer(nsid, NvmOpcode::Write, lba, fill).unwrap();
    }

    fn read(&mut self, nsid: u32, lba: u64) -> Result<u8, Status> {
        self.transfer(nsid, NvmOpcode::Read, lba, 0)
    }
}

#[test]
fn protection_information_survives_crashes_and_upgrades() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "a.img", 1 << 20);
    let disks = ["a.img?metadata=8&pi=2", "mem:1MiB?metadata=8&pi=2&iops=100000"];
    let server = Server::start_in(directory, &disks, &[]);
    let mut guest = Guest::attach(&server);
    for nsid in [1, 2] {
        assert_eq!(guest.read(nsid, 9), Ok(0), "what was never written is not checked");
        guest.write(nsid, 9, 7);
    }
    kill(&server, Signal::KILL);
    assert_eq!((guest.read(1, 9), guest.read(2, 9)), (Ok(7), Ok(7)));
    guest.write(2, 9, 8);
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!((guest.read(1, 9), guest.read(2, 9)), (Ok(7), Ok(8)));
    // The file has the data at the same offsets as for a namespace without metadata.
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9 * 512 + 100).unwrap();
    assert_eq!(byte, [7]);
    file.write_all_at(&[6], 9 * 512 + 100).unwrap();
    assert_eq!(guest.read(1, 9).unwrap_err().code(), Status::GUARD_CHECK);
    guest.write(1, 9, 1);
    assert_eq!(guest.read(1, 9), Ok(1));
}

#[test]
fn a_pool_has_formats_with_metadata() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start_in(directory, &[], &["--pool", "pool?capacity=8MiB"]);
    let verb = |verb: &str, options: &[&str]| {
        let mut command = program();
        command.arg(verb).arg(format!("vfio-user:{}", server.socket().display())).args(options);
        command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
        finish(command)
    };
    assert_eq!(verb("create-ns", &["-s", "2048"]).0, Some(0));
    assert_eq!(verb("attach-ns", &["-n", "1"]).0, Some(0));
    let (status, _, errors) = verb("format", &["-n", "1", "-l", "0", "-i", "2", "--force"]);
    assert!(status == Some(2) && errors.contains("Invalid Format"), "{errors}");
    let (status, _, errors) = verb("format", &["-n", "1", "-l", "2", "-i", "2", "--force"]);
    assert_eq!(status, Some(0), "{errors}");
    let mut guest = Guest::attach(&server);
    let namespace = guest.0.namespace(1).unwrap();
    assert_eq!((namespace.blocks(), namespace.unusable()), (2016, None));
    assert_eq!(namespace.metadata().unwrap().protection(), 2);
    guest.write(1, 9, 7);
    drop(guest);
    kill(&server, Signal::KILL);
    let mut guest = Guest::attach(&server);
    assert_eq!((guest.read(1, 9), guest.read(1, 8)), (Ok(7), Ok(0)));
    drop(guest);
    // Format NVM removes the metadata of the namespace again.
    let (status, _, errors) = verb("format", &["-n", "1", "-l", "0", "--force"]);
    assert_eq!(status, Some(0), "{errors}");
    let guest = Guest::attach(&server);
    assert_eq!(guest.0.namespace(1).unwrap().unusable(), None);
}
