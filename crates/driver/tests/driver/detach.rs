//! Detaching from a controller, with and without failures.

use crate::fake::Fake;
use crate::{attach, attach_with, impatient, options};
use shadowbell_driver::{Controller, DetachError};
use shadowbell_spec::regs;

fn is_clean(fake: &Fake) {
    fake.with(|state| {
        assert!(!state.csts.rdy());
        assert_eq!(state.dma.table().len(), 0);
        assert!(state.irqs.is_empty());
    });
}

#[test]
fn detach_deletes_queues_and_disables_the_controller() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let admin = controller.admin();
    controller.detach().unwrap();
    assert_eq!(fake.state().deleted, [1]);
    assert!(!fake.state().cc.en());
    let error = admin.identify_controller().unwrap_err();
    assert!(error.to_string().contains("detached"), "{error}");
    drop(admin);
    is_clean(&fake);
}

#[test]
fn dropping_the_last_handle_detaches() {
    let fake = Fake::new();
    let mut controller = attach(&fake);
    let queue = controller.take_queue_pair();
    let pool = controller.buffers(1, 4096).unwrap();
    drop(controller);
    assert!(fake.state().csts.rdy(), "the queue pair keeps the controller enabled");
    drop(queue);
    assert!(!fake.state().csts.rdy());
    assert_eq!(fake.state().resets, 0);
    drop(pool);
    is_clean(&fake);
}

#[test]
fn a_hung_shutdown_is_an_unclean_detach() {
    let fake = Fake::new();
    let controller = attach_with(&fake, &impatient());
    fake.with(|state| state.endless_shutdown = true);
    let error = controller.detach().unwrap_err();
    assert!(matches!(error, DetachError::Unclean { .. }), "{error}");
    assert!(error.to_string().contains("not cleanly"), "{error}");
    is_clean(&fake);
}

#[test]
fn a_controller_that_is_not_disabled_is_reset() {
    let fake = Fake::new();
    let controller = attach_with(&fake, &impatient());
    fake.with(|state| state.stuck = true);
    let error = controller.detach().unwrap_err();
    assert!(matches!(error, DetachError::Unclean { .. }), "{error}");
    assert_eq!(fake.state().resets, 1);
    is_clean(&fake);
}

#[test]
fn memory_stays_mapped_if_the_controller_cannot_be_stopped() {
    let fake = Fake::new();
    let mut controller = attach_with(&fake, &impatient());
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(2, 4096).unwrap();
    let command = controller.namespace(1).unwrap().read(0, 8).unwrap();
    fake.with(|state| state.hold = true);
    queue.submit(command, pool.take()).unwrap();
    queue.ring().unwrap();
    fake.with(|state| {
        state.stuck = true;
        state.no_reset = true;
        state.ignored.insert(0); // Delete I/O Submission Queue
    });
    let error = controller.detach().unwrap_err();
    assert!(matches!(error, DetachError::Lost { .. }), "{error}");
    let before = fake.state().dma.table().len();
    drop(queue);
    drop(pool);
    fake.with(|state| {
        // The detach has unmapped the buffers of admin commands, because no admin command was
        // outstanding. All other memory must remain mapped, because an I/O command is still in
        // flight.
        assert_eq!(state.dma.table().len(), before - 1, "queues and buffers are still mapped");
        // The held command still writes to the buffer.
        state.hold = false;
    });
    fake.complete(0);
}

#[test]
fn detaching_a_removed_controller_is_an_error() {
    let fake = Fake::new();
    let controller = attach(&fake);
    fake.with(|state| {
        state.removed = true;
        state.no_reset = true;
    });
    let error = controller.detach().unwrap_err();
    assert!(error.to_string().contains("all ones"), "{error}");
}

#[test]
fn detach_requests_a_normal_shutdown_while_enabled() {
    // The fake controller sets SHST only for a shutdown that is requested while CC.EN is set. So
    // this detach succeeds only if the driver requests the shutdown before it clears CC.EN.
    let fake = Fake::new();
    let controller = Controller::attach(fake.transport(), &options()).unwrap();
    fake.with(|state| assert_eq!(state.cc.shn(), regs::SHN_NONE));
    controller.detach().unwrap();
    let fake = Fake::new();
    let controller = attach_with(&fake, &impatient());
    fake.with(|state| state.ignored.insert(4)); // Delete I/O Completion Queue
    let error = controller.detach().unwrap_err();
    assert!(error.to_string().contains("did not delete queue pair 1"), "{error}");
    is_clean(&fake);
}
