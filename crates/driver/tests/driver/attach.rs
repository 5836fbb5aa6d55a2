//! Attaching: order of the commands, results, and every kind of failure.

use crate::fake::{BLOCKS, Fake};
use crate::{attach, impatient, options};
use shadowbell_driver::{AttachError, AttachOptions, Controller, Doorbells, RequestError};
use shadowbell_memory::Mapping;
use shadowbell_spec::Status;
use shadowbell_spec::identify::cns;
use shadowbell_spec::opcode::AdminOpcode;
use std::time::{Duration, Instant};

fn fails(fake: &Fake, options: &AttachOptions) -> AttachError {
    let error = Controller::attach(fake.transport(), options).unwrap_err();
    fake.with(|state| {
        assert!(!state.csts.rdy(), "the controller is left disabled");
        assert_eq!(state.dma.table().len(), 0, "memory is left with the controller");
        assert!(state.irqs.is_empty(), "an interrupt is left");
    });
    error
}

#[test]
fn a_correct_controller_is_attached() {
    let fake = Fake::new();
    let options = AttachOptions { queue_pairs: 3, ..options() };
    let mut controller = Controller::attach(fake.transport(), &options).unwrap();
    assert_eq!(controller.queue_pairs(), 3);
    assert_eq!(controller.queue_depth(), 16);
    assert_eq!(controller.doorbells(), Doorbells::Shadow);
    assert_eq!(controller.max_transfer_bytes(), 128 * 1024);
    let namespace = controller.namespace(1).unwrap();
    assert_eq!((namespace.blocks(), namespace.block_size()), (BLOCKS, 512));
    assert_eq!(namespace.nguid(), Some([7; 16]));
    assert_eq!(namespace.uuid(), Some([1; 16]));
    assert_eq!(namespace.eui64(), None);
    assert_eq!(namespace.max_transfer_bytes(), 128 * 1024);
    for qid in 1..=3 {
        let queue = controller.take_queue_pair().unwrap();
        assert_eq!((queue.qid(), queue.capacity()), (qid, 15));
        assert!(queue.has_interrupt());
    }
    assert!(controller.take_queue_pair().is_none());
    fake.with(|state| {
        let at = |opcode: AdminOpcode| {
            state.admin_log.iter().position(|seen| *seen == opcode as u8).unwrap()
        };
        let config = at(AdminOpcode::DoorbellBufferConfig);
        assert!(config < at(AdminOpcode::CreateIoCq), "shadow doorbells before the first queue");
        assert!(config > at(AdminOpcode::Identify));
        assert_eq!(state.event_requests.len(), 4);
    });
}

#[test]
fn admin_doorbells_reach_register_and_shadow() {
    for (admin_by_register, polling) in [(false, false), (false, true), (true, false)] {
        let fake = Fake::new();
        fake.with(|state| {
            state.admin_by_register = admin_by_register;
            state.polling = polling;
        });
        let mut options = options();
        // A short limit: an admin command whose doorbell the controller does not read waits until
        // this limit has expired.
        options.timeouts.admin = Duration::from_millis(200);
        let controller = Controller::attach(fake.transport(), &options).unwrap();
        assert_eq!(controller.doorbells(), Doorbells::Shadow);
        controller.detach().unwrap();
    }
}

#[test]
fn fewer_queue_pairs_than_requested_are_accepted() {
    let fake = Fake::new();
    fake.with(|state| state.granted = 2);
    let options = AttachOptions { queue_pairs: 5, ..options() };
    let mut controller = Controller::attach(fake.transport(), &options).unwrap();
    assert_eq!(controller.queue_pairs(), 2);
    let first = controller.take_queue_pair().unwrap();
    let _second = controller.take_queue_pair().unwrap();
    assert!(controller.take_queue_pair().is_none());
    let error = controller.create_queue_pair(16).unwrap_err();
    assert!(error.to_string().contains("grants no more"), "{error}");
    drop(first);
    let again = controller.create_queue_pair(4).unwrap();
    assert_eq!((again.qid(), again.capacity()), (1, 3));
}

#[test]
fn an_enabled_controller_is_disabled_first() {
    let fake = Fake::new();
    std::mem::forget(attach(&fake));
    let second = attach(&fake);
    assert_eq!(second.namespaces().len(), 1);
}

#[test]
fn refused_shadow_doorbells_are_replaced_by_plain_ones() {
    let fake = Fake::new();
    let opcode = AdminOpcode::DoorbellBufferConfig as u8;
    fake.with(|state| state.refused.insert(opcode, Status::INVALID_FIELD));
    assert_eq!(attach(&fake).doorbells(), Doorbells::Mmio);
    assert!(fake.state().admin_log.contains(&opcode));

    let fake = Fake::new();
    fake.with(|state| state.identity.oacs = state.identity.oacs.with_doorbell_buffer_config(false));
    for doorbells in [Doorbells::Auto, Doorbells::Shadow, Doorbells::Mapped, Doorbells::Mmio] {
        let options = AttachOptions { doorbells, ..options() };
        let controller = Controller::attach(fake.transport(), &options).unwrap();
        assert_eq!(controller.doorbells(), Doorbells::Mmio);
    }
    assert!(!fake.state().admin_log.contains(&opcode), "it was not even asked");
}

#[test]
fn mappable_doorbells_are_mapped_when_best() {
    let fake = Fake::new();
    fake.with(|state| state.doorbell_page = Some(Mapping::anonymous(4096).unwrap().bytes()));
    let mode = |doorbells| {
        let options = AttachOptions { doorbells, ..options() };
        Controller::attach(fake.transport(), &options).unwrap().doorbells()
    };
    assert_eq!(mode(Doorbells::Mapped), Doorbells::Mapped);
    assert_eq!(mode(Doorbells::Auto), Doorbells::Shadow);
    assert_eq!(mode(Doorbells::Mmio), Doorbells::Mmio);
    fake.with(|state| state.identity.oacs = state.identity.oacs.with_doorbell_buffer_config(false));
    assert_eq!(mode(Doorbells::Auto), Doorbells::Mapped);
    assert_eq!(mode(Doorbells::Shadow), Doorbells::Mmio);
}

#[test]
fn invalid_attach_options_are_refused() {
    let fake = Fake::new();
    let base = options();
    for (options, word) in [
        (AttachOptions { queue_pairs: 0, ..base.clone() }, "queue_pairs"),
        (AttachOptions { queue_pairs: u16::MAX, ..base.clone() }, "queue_pairs"),
        (AttachOptions { queue_depth: 1, ..base.clone() }, "queue_depth"),
        (AttachOptions { queue_depth: 65537, ..base.clone() }, "queue_depth"),
        (AttachOptions { max_transfer_bytes: 512, ..base.clone() }, "max_transfer_bytes"),
        (AttachOptions { page_size: Some(6000), ..base.clone() }, "page_size"),
        (AttachOptions { page_size: Some(1 << 20), ..base.clone() }, "CAP.MPSMIN"),
    ] {
        let error = fails(&fake, &options);
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn attaching_fails_if_the_controller_never_gets_ready() {
    let fake = Fake::new();
    fake.with(|state| state.stuck = true);
    let began = Instant::now();
    let error = fails(&fake, &impatient());
    assert!(matches!(error, AttachError::NotReady { step: "enabling", .. }), "{error}");
    // The attach must not fail before the limit.
    assert!(began.elapsed() >= impatient().timeouts.ready.unwrap());
    assert!(error.to_string().contains("reset the device"), "{error}");
}

#[test]
fn attaching_fails_if_the_controller_never_gets_disabled() {
    let fake = Fake::new();
    std::mem::forget(attach(&fake));
    fake.with(|state| state.stuck = true);
    let error = Controller::attach(fake.transport(), &impatient()).unwrap_err();
    assert!(matches!(error, AttachError::NotReady { step: "disabling", .. }), "{error}");
}

#[test]
fn the_controllers_own_timeout_is_honoured() {
    let fake = Fake::new();
    fake.with(|state| {
        state.stuck = true;
        state.cap = state.cap.with_to(1);
    });
    let mut options = impatient();
    options.timeouts.ready = None;
    let began = Instant::now();
    fails(&fake, &options);
    // CAP.TO is in units of 500 ms.
    assert!(began.elapsed() >= Duration::from_millis(500));
}

#[test]
fn attaching_fails_on_a_fatal_status() {
    let fake = Fake::new();
    fake.with(|state| state.fatal = true);
    let error = fails(&fake, &options());
    assert!(matches!(error, AttachError::Fatal { step: "enabling", .. }), "{error}");
}

#[test]
fn a_stale_translation_costs_one_reset() {
    for no_reset in [false, true] {
        let fake = Fake::new();
        fake.with(|state| (state.stale, state.no_reset) = (1, no_reset));
        let controller = Controller::attach(fake.transport(), &options()).unwrap();
        assert_eq!(fake.state().resets, usize::from(!no_reset));
        assert_eq!(controller.namespaces().len(), 1);
        controller.detach().unwrap();
    }
}

#[test]
fn a_second_fatal_status_fails_the_attach() {
    let fake = Fake::new();
    fake.with(|state| state.stale = 2);
    let error = fails(&fake, &options());
    assert!(error.to_string().contains("CSTS.CFS"), "{error}");
    assert_eq!(fake.state().resets, 1);
}

#[test]
fn attaching_fails_on_a_removed_controller() {
    let fake = Fake::new();
    fake.with(|state| state.removed = true);
    let error = Controller::attach(fake.transport(), &options()).unwrap_err();
    assert!(matches!(error, AttachError::Absent { .. }), "{error}");
}

#[test]
fn an_unsupported_controller_is_refused() {
    for (cap, word) in [
        (Fake::new().state().cap.with_css(0x80), "NVM command set"),
        (Fake::new().state().cap.with_mqes(0), "one entry"),
    ] {
        let fake = Fake::new();
        fake.with(|state| state.cap = cap);
        let error = fails(&fake, &options());
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_refused_or_hung_command_fails_the_attach() {
    use AdminOpcode::{CreateIoCq, CreateIoSq, Identify, SetFeatures};
    for opcode in [Identify, SetFeatures, CreateIoCq, CreateIoSq] {
        let fake = Fake::new();
        fake.with(|state| state.refused.insert(opcode as u8, Status::INTERNAL));
        let error = fails(&fake, &options()).to_string();
        assert!(error.contains(opcode.name()), "{error}");
        assert!(error.contains("Internal Error"), "{error}");

        let fake = Fake::new();
        fake.with(|state| state.ignored.insert(opcode as u8));
        let error = fails(&fake, &impatient()).to_string();
        assert!(error.contains(opcode.name()) && error.contains("within"), "{error}");
    }
}

#[test]
fn a_failed_attach_resets_a_hung_controller() {
    let fake = Fake::new();
    fake.with(|state| {
        state.refused.insert(AdminOpcode::CreateIoCq as u8, Status::INTERNAL);
        state.endless_shutdown = true;
    });
    fails(&fake, &impatient());
}

#[test]
fn invalid_namespaces_are_skipped() {
    let fake = Fake::new();
    fake.with(|state| {
        let good = state.namespaces[&1];
        // The bad namespaces: an invalid format, a block of 1 byte, metadata, and no blocks at all.
        let mut bad = good;
        bad.flbas = bad.flbas.with_low(7);
        state.namespaces.insert(2, bad);
        let mut bad = good;
        bad.lbaf[0].lbads = 0;
        state.namespaces.insert(3, bad);
        let mut bad = good;
        bad.lbaf[0].ms = 8;
        state.namespaces.insert(4, bad);
        let mut none = good;
        none.nsze = 0;
        state.namespaces.insert(5, none);
        let mut huge = good;
        huge.nsze = u64::MAX;
        huge.nsattr = 1;
        state.namespaces.insert(6, huge);
    });
    let controller = attach(&fake);
    let nsids: Vec<_> = controller.namespaces().iter().map(|n| n.nsid()).collect();
    assert_eq!(nsids, [1, 2, 3, 4, 6]);
    for nsid in 2..=4 {
        let namespace = controller.namespace(nsid).unwrap();
        assert!(namespace.unusable().is_some());
        let error = namespace.read(0, 1).unwrap_err();
        assert!(matches!(error, RequestError::Unusable { .. }), "{error}");
    }
    let huge = controller.namespace(6).unwrap();
    assert!(huge.is_read_only());
    assert_eq!(huge.bytes(), u64::MAX);
    assert!(huge.read(u64::MAX - 1, 1).is_ok());
    assert!(huge.read(u64::MAX, 1).is_err());
}

#[test]
fn invalid_namespace_lists_are_refused() {
    let fake = Fake::new();
    let mut list = vec![0; 4096];
    list[0] = 2;
    list[4] = 1;
    fake.with(|state| state.wrong_identify.insert(cns::ACTIVE_NAMESPACES, list));
    let error = fails(&fake, &options());
    assert!(error.to_string().contains("1 after 2"), "{error}");
    // A list that never ends: each command returns the same full list.
    let fake = Fake::new();
    let list: Vec<u8> = (1..=1024u32).flat_map(u32::to_le_bytes).collect();
    fake.with(|state| state.wrong_identify.insert(cns::ACTIVE_NAMESPACES, list));
    fails(&fake, &options());
}

#[test]
fn many_namespaces_are_attached() {
    let fake = Fake::new();
    fake.with(|state| {
        let one = state.namespaces[&1];
        state.namespaces = (1..=1500).map(|nsid| (nsid * 3, one)).collect();
    });
    let controller = attach(&fake);
    assert_eq!(controller.namespaces().len(), 1500);
    assert_eq!(controller.namespaces().last().unwrap().nsid(), 4500);
}

#[test]
fn large_pages_and_another_doorbell_stride_work() {
    let fake = Fake::new();
    fake.with(|state| state.cap = state.cap.with_mpsmin(2).with_dstrd(3));
    let controller = attach(&fake);
    assert_eq!(fake.state().cc.mps(), 2);
    // MDTS counts pages of CAP.MPSMIN.
    assert_eq!(controller.max_transfer_bytes(), 512 * 1024);
    let options = AttachOptions { page_size: Some(65536), ..options() };
    drop(controller);
    let _controller = Controller::attach(fake.transport(), &options).unwrap();
    assert_eq!(fake.state().cc.mps(), 4);
}

#[test]
fn huge_memory_pages_need_the_option() {
    let fake = Fake::new();
    fake.with(|state| state.cap = state.cap.with_mpsmin(15).with_mpsmax(15));
    let error = Controller::attach(fake.transport(), &options()).unwrap_err();
    assert!(matches!(error, AttachError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("134217728 bytes (CAP.MPSMIN)"), "{error}");
    fake.with(|state| state.cap = state.cap.with_mpsmin(9).with_mpsmax(9));
    assert!(Controller::attach(fake.transport(), &options()).is_err());
    let asked = AttachOptions { page_size: Some(2 << 20), ..options() };
    Controller::attach(fake.transport(), &asked).unwrap();
}

#[test]
fn transfers_have_the_smaller_limit() {
    let fake = Fake::new();
    fake.with(|state| state.identity.mdts = 0);
    assert_eq!(attach(&fake).max_transfer_bytes(), 1 << 20);
    fake.with(|state| state.identity.mdts = 255);
    assert_eq!(attach(&fake).max_transfer_bytes(), 1 << 20);
    let options = AttachOptions { max_transfer_bytes: 8192, ..options() };
    let controller = Controller::attach(fake.transport(), &options).unwrap();
    assert_eq!(controller.max_transfer_bytes(), 8192);
}

#[test]
fn queues_without_a_vector_poll() {
    let fake = Fake::new();
    fake.with(|state| state.vectors = 2);
    let options = AttachOptions { queue_pairs: 2, ..options() };
    let mut controller = Controller::attach(fake.transport(), &options).unwrap();
    assert!(controller.take_queue_pair().unwrap().has_interrupt());
    assert!(!controller.take_queue_pair().unwrap().has_interrupt());
    drop(controller);
    fake.with(|state| state.vectors = 0);
    let mut controller = Controller::attach(fake.transport(), &options).unwrap();
    assert!(!controller.has_interrupts());
    assert!(!controller.take_queue_pair().unwrap().has_interrupt());
    assert!(controller.on_event(|_| {}).unwrap().is_none());
}
