//! Hostile controller against the driver: registers, Identify data, completions and EventIdx with
//! any content, and commands that are never completed or completed twice. The driver must recover,
//! or end with an error.
//!
//! Whatever the controller returns, this body also checks that
//! * the driver's queue entries and data pointers are in shared memory;
//! * tails are valid;
//! * no buffer is returned, and no memory is unmapped, while the controller may still write to it;
//! * the number of commands is bounded.

mod device;

use crate::limits::Limits;
use crate::source::Source;
use ::shadowbell_driver::{
    AttachOptions, Controller, Doorbells, QueuePair, Recovery, SpinPolicy, Timeouts,
};
use device::Device;
use shadowbell_spec::regs::{Cap, Csts};
use std::sync::Arc;
use std::time::Duration;

const ACTIONS: usize = 48;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let script = source.bytes(400);
    let device = Device::new(script);
    shape(&mut source, &device);
    let options = options(&mut source);
    let attached = Controller::attach(Arc::new(device.clone()), &options);
    limits.step("driver");
    if let Ok(controller) = attached {
        use_it(&mut source, &device, controller, &limits);
    }
    device.state().malicious = false;
}

/// Chooses the properties of the controller.
fn shape(source: &mut Source<'_>, device: &Device) {
    let mut state = device.state();
    if source.rarely(3) {
        state.cap = Cap::from_bits(source.near(&[
            state.cap.into_bits(),
            state.cap.with_mqes(1).into_bits(),
            state.cap.with_mqes(0).into_bits(),
            state.cap.with_dstrd(15).into_bits(),
            state.cap.with_dstrd(1).into_bits(),
            state.cap.with_mpsmin(1).into_bits(),
        ]));
    }
    state.vectors = source.of(&[8, 8, 1, 0, u32::MAX]);
    if source.rarely(8) {
        state.page = device::page();
    }
    if source.rarely(8) {
        state.csts = Csts::from_bits(source.u32() & 0x3f);
    }
}

fn options(source: &mut Source<'_>) -> AttachOptions {
    const SHORT_TIMEOUT: Duration = Duration::from_millis(4);
    let recovery = if source.bool() { Recovery::OFF } else { Recovery::default() };
    AttachOptions {
        queue_pairs: source.of(&[1, 2, 4]),
        queue_depth: source.of(&[8, 2, 3, 64]),
        doorbells: source.of(&[
            Doorbells::Auto,
            Doorbells::Shadow,
            Doorbells::Mmio,
            Doorbells::Mapped,
        ]),
        interrupts: source.bool(),
        spin: SpinPolicy { max: Duration::from_micros(10), adaptive: false },
        max_transfer_bytes: 1 << 16,
        page_size: source.of(&[None, None, Some(4096), Some(65536)]),
        timeouts: Timeouts {
            ready: Some(SHORT_TIMEOUT),
            admin: SHORT_TIMEOUT,
            io: SHORT_TIMEOUT,
            shutdown: SHORT_TIMEOUT,
        },
        recovery: Recovery { repeats: 1, ..recovery },
    }
}

fn use_it(source: &mut Source<'_>, device: &Device, mut controller: Controller, limits: &Limits) {
    let mut queues: Vec<QueuePair> = std::iter::from_fn(|| controller.take_queue_pair()).collect();
    let pool = controller.buffers(8, 1 << 16).ok();
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        limits.step("driver");
        let which = source.below(queues.len().max(1));
        match source.below(16) {
            0..=5 => {
                let Some(queue) = queues.get_mut(which) else { continue };
                for _ in 0..1 + source.below(4) {
                    let namespaces = controller.namespaces();
                    let Some(namespace) = namespaces.get(source.below(namespaces.len().max(1)))
                    else {
                        continue;
                    };
                    let (lba, blocks) = (source.u8().into(), 1 + u32::from(source.u8() % 64));
                    let command = match source.below(4) {
                        0 => namespace.write(lba, blocks),
                        1 => Ok(namespace.flush()),
                        _ => namespace.read(lba, blocks),
                    };
                    let buffer = pool.as_ref().and_then(|pool| pool.take());
                    if let Ok(command) = command {
                        let _ = queue.submit(command, buffer);
                    }
                }
                let _ = queue.ring();
            }
            6..=8 => {
                let Some(queue) = queues.get_mut(which) else { continue };
                take(device, queue);
            }
            9 => device.state().catch_up(1 + source.below(8)),
            10 => {
                let (qid, cid) = (u16::from(source.u8() % 4), u16::from(source.u8() % 64));
                device.state().forge(qid, cid);
            }
            11 => device.state().event(),
            12 => {
                let mut state = device.state();
                match source.below(4) {
                    0 => state.csts = state.csts.with_cfs(true),
                    1 => state.csts = Csts::from_bits(source.u32() & 0x3f),
                    2 => state.removed = source.rarely(4),
                    _ => state.run(),
                }
            }
            13 => {
                let admin = controller.admin();
                match source.below(5) {
                    0 => drop(admin.smart_log()),
                    1 => drop(admin.error_log(source.u8().into())),
                    2 => drop(admin.identify_namespace_ids(1)),
                    3 => drop(admin.active_namespaces()),
                    _ => drop(admin.take_events()),
                }
            }
            14 => drop(controller.refresh_namespaces()),
            _ => {
                match source.below(4) {
                    0 => drop(controller.reset()),
                    1 => drop(controller.check()),
                    2 => {
                        if let Some(queue) = (which < queues.len()).then(|| queues.remove(which)) {
                            drop(queue);
                        }
                    }
                    _ => queues.extend(controller.create_queue_pair(8).ok()),
                };
            }
        }
    }
    // The controller behaves correctly from now on, so that the driver can release its memory.
    {
        let mut state = device.state();
        (state.malicious, state.removed) = (false, false);
    }
    for queue in &mut queues {
        take(device, queue);
    }
    drop((queues, pool));
    let _ = controller.detach();
    limits.step("driver");
}

/// Takes completions, and checks that the controller cannot write to a returned buffer.
fn take(device: &Device, queue: &mut QueuePair) {
    let (qid, mut taken) = (queue.qid(), Vec::new());
    let _ = queue.poll(|completion| taken.push(completion));
    for completion in taken {
        let cid = completion.token.cid();
        let busy = completion.buffer.is_some() && device.state().is_busy(qid, cid);
        assert!(!busy, "the buffer of command {cid} of queue {qid} comes back under I/O");
    }
}
