//! Admin commands.

use crate::fake::Fake;
use crate::{attach, attach_with, impatient, options};
use shadowbell_driver::{AdminData, CommandError, Controller, LogRequest};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::{Select, fid};
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::{Cqe, Sqe, Status};
use shadowbell_testing::wait::LIMIT;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

#[test]
fn features_logs_and_abort() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let admin = controller.admin();
    assert_eq!(admin.get_feature(fid::VOLATILE_WRITE_CACHE, 0, Select::Current).unwrap(), 0x100);
    let (dw0, data) = admin.get_feature_data(fid::TIMESTAMP, 0, Select::Current, 7, 8).unwrap();
    assert_eq!((dw0, data), (0x107, vec![0; 8]), "what is not written reads as zeroes");
    admin.set_feature_data(fid::HOST_IDENTIFIER, 0, 1, &[1; 16]).unwrap();
    assert!(admin.abort(1, 0).unwrap());
    assert!(!admin.abort(1, 9).unwrap());
    assert_eq!(admin.smart_log().unwrap().available_spare, 3);
    let entries = admin.error_log(100).unwrap();
    assert_eq!(entries.len(), 16, "as many as there are");
    let registers = admin.registers().unwrap();
    assert!(registers.csts.rdy() && registers.cc.en());
    assert_eq!(registers.cap, controller.capabilities());
    assert!(admin.stats().completed > 5);
}

#[test]
fn long_log_pages_come_in_pieces() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let max = controller.admin().max_transfer_bytes() as usize;
    assert_eq!(max, 128 * 1024);
    let before = fake.state().admin_log.len();
    let request = LogRequest { offset: 8, ..LogRequest::new(7, 2 * max + 6) };
    let log = controller.admin().log_page(request).unwrap();
    assert_eq!(log.len(), 2 * max + 6);
    assert!(log.iter().enumerate().all(|(i, byte)| *byte == (i + 8) as u8));
    assert_eq!(fake.state().admin_log.len() - before, 3);
}

#[test]
fn any_command_has_data_and_a_deadline() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let admin = controller.admin();
    let vendor = Sqe::new(0xc1, 0, 0);
    let result = admin.execute(vendor, AdminData::None, LIMIT).unwrap();
    assert_eq!(result.status, Status::INVALID_OPCODE, "a status is a result");
    let too_long = vec![0; 256 * 1024];
    let error = admin.execute(vendor, AdminData::ToController(&too_long), LIMIT).unwrap_err();
    assert!(error.to_string().contains("more than the 131072"), "{error}");

    fake.with(|state| state.ignored.insert(0xc1));
    let began = Instant::now();
    // The command never completes, so only this limit ends it. The limit is short, because the test
    // waits for it.
    let limit = Duration::from_millis(50);
    let error = admin.execute(vendor, AdminData::FromController(4096), limit).unwrap_err();
    assert!(matches!(error, CommandError::Timeout { .. }), "{error}");
    // The command must not end before the limit.
    assert!(began.elapsed() >= limit);
    // The admin queue stays usable. The completion that arrives late must not complete another
    // command.
    for _ in 0..100 {
        admin.identify_controller().unwrap();
    }
    for cid in 0..=u16::MAX {
        if cid % 5000 == 0 {
            fake.post(0, Cqe::new(cid, 0, 0, Status::SUCCESS, 0), 0, None);
        }
    }
    admin.identify_controller().unwrap();
}

#[test]
fn hung_commands_fill_the_queue_only() {
    let fake = Fake::new();
    let controller = attach_with(&fake, &impatient());
    let admin = controller.admin();
    fake.with(|state| state.ignored.insert(0xc1));
    // The limit is short, because each command exceeds it.
    let limit = Duration::from_millis(1);
    for _ in 0..80 {
        let error = admin.execute(Sqe::new(0xc1, 0, 0), AdminData::None, limit).unwrap_err();
        assert!(matches!(error, CommandError::Timeout { .. }), "{error}");
    }
    drop(admin);
    // The commands that delete the queue fail as well. The driver disables the controller
    // nevertheless.
    assert!(controller.detach().is_err());
    assert!(!fake.state().csts.rdy());
}

#[test]
fn a_fatal_status_ends_the_wait() {
    let fake = Fake::new();
    let controller = Controller::attach(fake.transport(), &options()).unwrap();
    fake.with(|state| {
        state.ignored.insert(AdminOpcode::Identify as u8);
        state.csts = state.csts.with_cfs(true);
    });
    let error = controller.admin().identify_controller().unwrap_err();
    assert!(error.to_string().contains("CSTS.CFS"), "{error}");
}

#[test]
fn a_completion_found_by_another_thread_reaches_its_owner() {
    let fake = Fake::new();
    let controller = attach(&fake);
    fake.with(|state| state.ignored.insert(0xc1));
    for round in 0..30 {
        std::thread::scope(|scope| {
            let admin = controller.admin();
            let waits = scope.spawn(move || {
                let vendor = Sqe::new(0xc1, 0, 0);
                admin.execute(vendor, AdminData::None, LIMIT).unwrap()
            });
            let cid = loop {
                if let Some(cid) = fake.with(|state| state.ignored_cids.pop()) {
                    break cid;
                }
                std::thread::yield_now();
            };
            // The pause lets the waiting thread enter the phase in which it polls less often.
            std::thread::sleep(Duration::from_millis(2));
            fake.post(0, Cqe::new(cid, 0, 0, Status::SUCCESS, round), 0, None);
            // Another thread reaps that completion, and reuses the slot for its own command.
            for _ in 0..3 {
                controller.admin().identify_controller().unwrap();
            }
            assert_eq!(waits.join().unwrap().dw0, round);
        });
    }
}

#[test]
fn several_threads_share_the_admin_queue() {
    let fake = Fake::new();
    let controller = attach(&fake);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let admin = controller.admin();
            scope.spawn(move || {
                for i in 0..100 {
                    let len = 4 + (i + thread) % 64 * 4;
                    let log = admin.log_page(LogRequest::new(7, len)).unwrap();
                    assert_eq!(log.len(), len);
                }
            });
        }
    });
}

#[test]
fn events_are_stored_until_taken() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let admin = controller.admin();
    assert!(admin.take_events().is_empty());
    for _ in 0..20 {
        fake.event(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0());
        fake.event(AsyncEvent::TEMPERATURE_THRESHOLD.dw0());
        assert_eq!(
            admin.take_events(),
            [AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED, AsyncEvent::TEMPERATURE_THRESHOLD]
        );
        assert_eq!(fake.state().event_requests.len(), 4, "each is asked for again");
    }
}

#[test]
fn excess_events_drop_the_oldest() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let admin = controller.admin();
    for info in 0..300 {
        fake.event(info << 8);
        // This command reaps completions, but does not take the events.
        admin.get_feature(6, 0, Select::Current).unwrap();
    }
    let events = admin.take_events();
    assert_eq!(events.len(), 256);
    assert_eq!(events.last().unwrap().info, 299u32 as u8, "the newest are kept");
}

#[test]
fn events_are_delivered_by_interrupt() {
    let fake = Fake::new();
    let controller = attach(&fake);
    let (sender, events) = mpsc::channel();
    let listener = controller
        .on_event(move |event| sender.send(event).unwrap())
        .unwrap()
        .expect("there are interrupts");
    for _ in 0..50 {
        fake.event(AsyncEvent::TEMPERATURE_THRESHOLD.dw0());
        assert_eq!(events.recv_timeout(LIMIT).unwrap(), AsyncEvent::TEMPERATURE_THRESHOLD);
        controller.admin().identify_controller().unwrap();
    }
    drop(listener);
    let end = events.recv_timeout(LIMIT);
    assert_eq!(end, Err(RecvTimeoutError::Disconnected), "the function is dropped with its thread");
    drop(controller);
    assert!(!fake.state().csts.rdy());
}

#[test]
fn a_refused_event_request_is_not_repeated() {
    let fake = Fake::new();
    let opcode = AdminOpcode::AsyncEventRequest as u8;
    fake.with(|state| state.refused.insert(opcode, Status::AER_LIMIT));
    let controller = attach(&fake);
    assert!(controller.admin().take_events().is_empty());
    let count = fake.state().admin_log.iter().filter(|seen| **seen == opcode).count();
    assert_eq!(count, 4);
}

#[test]
fn namespaces_are_read_again_on_request() {
    let fake = Fake::new();
    let mut controller = attach(&fake);
    fake.with(|state| {
        let mut larger = state.namespaces[&1];
        larger.nsze = 4096;
        state.namespaces.insert(1, larger);
        state.namespaces.insert(2, larger);
    });
    controller.refresh_namespaces().unwrap();
    assert_eq!(controller.namespaces().len(), 2);
    assert_eq!(controller.namespace(1).unwrap().blocks(), 4096);
}
