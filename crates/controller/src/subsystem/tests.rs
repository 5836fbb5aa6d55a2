use super::*;
use crate::notice::tests::Notices;

const UUID: Uuid = [7; 16];
const HOST: HostId = HostId::Short(1);

fn open(path: &std::path::Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Executes a command and waits for its end.
fn act(member: &Member, host: HostId, action: Action, persistent: Option<bool>) -> Status {
    let notices = Arc::new(Notices::default());
    let ended = Notice::ReservationEnded { ticket: 1, status: Status::SUCCESS };
    let latch = Latch::new(notices.handle(), ended);
    let command = Command { host, action, persistent, aborts: false };
    member.submit(Job::Act { uuid: UUID, command, latch });
    loop {
        match notices.0.lock().pop() {
            Some(Notice::ReservationEnded { status, .. }) => return status,
            Some(other) => panic!("{other:?}"),
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn controller_identifiers_are_assigned_and_reused() {
    let subsystem = Subsystem::new(None).unwrap();
    let first = subsystem.join(None).unwrap();
    let third = subsystem.join(Some(3)).unwrap();
    assert_eq!(subsystem.join(Some(3)).unwrap_err(), JoinError::Taken(3));
    let second = subsystem.join(None).unwrap();
    assert_eq!([&first, &second, &third].map(|member| member.cntlid()), [1, 2, 3]);
    assert_eq!(first.controllers(), [1, 2, 3]);
    drop(second);
    assert_eq!(first.controllers(), [1, 3]);
    assert_eq!(subsystem.join(None).unwrap().cntlid(), 2);
    for wrong in [0, MAX_CONTROLLERS + 1, 0xffff] {
        assert_eq!(subsystem.join(Some(wrong)).unwrap_err(), JoinError::NoRoom);
    }
}

#[test]
fn reservations_persist_across_starts_and_successors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let make = || Subsystem::new(Some(open(&path))).unwrap().join(None).unwrap();
    let is_registered = |member: &Member| member.report(&UUID, false).unwrap().len() > 24;
    let member = make();
    member.power_on();
    let register = Action::Register { key: 5 };
    assert_eq!(act(&member, HOST, register, None), Status::SUCCESS);
    let successor = make();
    successor.resume();
    assert!(is_registered(&successor));
    let restarted = make();
    restarted.power_on();
    assert!(!is_registered(&restarted));
    // The file no longer contains the registration either.
    successor.resume();
    assert!(!is_registered(&successor));
    // `early` is created before the last change, so it must read the file again.
    let early = make();
    assert_eq!(act(&restarted, HOST, register, Some(true)), Status::SUCCESS);
    early.resume();
    assert!(is_registered(&early) && early.is_persistent(&UUID));
    let restarted = make();
    restarted.power_on();
    assert!(is_registered(&restarted));
}

#[test]
fn a_file_of_another_kind_is_refused_and_one_that_can_not_be_written_fails_the_command() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    std::fs::write(&path, "a disk image, perhaps").unwrap();
    let error = Subsystem::new(Some(open(&path))).unwrap_err();
    assert!(error.to_string().contains("reservations"), "{error}");
    std::fs::write(&path, "").unwrap();
    let member = Subsystem::new(Some(File::open(&path).unwrap())).unwrap();
    let member = member.join(None).unwrap();
    let status = act(&member, HOST, Action::Register { key: 5 }, None);
    assert_eq!(status, Status::INTERNAL);
    assert_eq!(member.report(&UUID, false).unwrap().len(), 24, "nothing has changed");
}

#[test]
fn persistence_without_a_file_is_refused() {
    let member = Subsystem::new(None).unwrap().join(None).unwrap();
    let status = act(&member, HOST, Action::Register { key: 5 }, Some(true));
    assert_eq!(status, Status::INVALID_FIELD.with_dnr());
}
