//! Live migration of a guest between server processes that share an image.

use crate::harness::{Server, image, until};
use crate::recover::kill;
use crate::supervisor::{children, has_ended, signal, worker};
use crate::upgrade::upgrade;
use rustix::process::Signal;
use shadowbell_testing::guest::Guest;
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::Options;
use shadowbell_vfio_user::migration::MigrationState;
use std::path::Path;

fn serve(disk: &Path, options: &[&str]) -> Server {
    let options = [&["--serial", "MOVED"], options].concat();
    Server::start(&[disk.to_str().unwrap()], &options)
}

fn connect(server: &Server) -> Client {
    Client::connect(server.socket(), Options::default()).unwrap()
}

/// A guest migrates several times with its image. Only one server can lock the image, so the source
/// server ends before the destination server starts.
#[test]
fn a_guest_migrates_between_servers_with_its_image() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(directory.path(), "disk.img", 1 << 20);
    let mut server = serve(&disk, &["--workers", "2"]);
    let mut guest = Guest::boot(connect(&server), 2, true);
    guest.work(50);
    for turn in 0..3 {
        let (memory, stream, moved) = guest.suspend(2);
        assert!(moved.dirty > 0, "{moved:?}");
        assert!(server.stop().success(), "{}", server.stderr());
        server = serve(&disk, if turn == 1 { &["--supervisor"] } else { &[] });
        guest.resume(connect(&server), memory, &stream).unwrap();
        guest.work(50);
        if turn == 1 {
            // The journal also records the commands of a device that was migrated to this server.
            guest.submit(16);
            kill(&server, Signal::KILL);
            guest.work(20);
        }
        guest.verify();
    }
    assert!(guest.completed() > 200, "{}", guest.completed());
}

/// After an upgrade or a crash at the source, the next process must not resume a suspended device,
/// because the guest may run at the destination.
#[test]
fn a_suspended_device_does_not_resume_in_the_next_process() {
    suspended(|server| {
        // A device that is being migrated cannot be recovered, and must not prevent an upgrade. So
        // the upgrade disconnects its client.
        let (status, output, errors) = upgrade(&server.pid().to_string(), None);
        assert_eq!(status, Some(0), "{errors}");
        assert!(
            output.contains("its client cannot be recovered: it is being migrated"),
            "{output}"
        );
    });
    suspended(|server| signal(worker(server), Signal::KILL));
}

/// Suspends a device, calls `replace` to replace the server process, and checks that the device
/// does not resume.
fn suspended(replace: impl Fn(&Server)) {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(directory.path(), "disk.img", 1 << 20);
    let mut server = serve(&disk, &["--supervisor"]);
    let mut guest = Guest::boot(connect(&server), 2, true);
    guest.work(20);
    let (memory, stream, moved) = guest.suspend(1);
    // The queues of the suspended device have commands in flight.
    assert!(moved.in_flight > 0, "{moved:?}");
    server.wait_for_log("will not survive a crash of this server");
    let before = worker(&server);
    let content = std::fs::read(&disk).unwrap();
    replace(&server);
    until("the next worker", || {
        children(server.pid()).iter().any(|pid| *pid != before) && has_ended(before)
    });
    // The controller accepts another client after the replacement.
    drop(connect(&server));
    let gone = guest.client().migration_state();
    assert!(gone.is_err(), "{gone:?}");
    assert!(content == std::fs::read(&disk).unwrap(), "the image was written meanwhile");
    assert!(server.stop().success(), "{}", server.stderr());
    let server = serve(&disk, &[]);
    guest.resume(connect(&server), memory, &stream).unwrap();
    guest.work(20);
    guest.verify();
    assert_eq!(guest.client().migration_state().unwrap(), MigrationState::Running);
}
