//! From a device in whatever state to a controller with queues.
//!
//! Base 2.1, 3.5.1 "Memory-based Controller Initialization". Doorbell Buffer Config comes before the
//! first I/O queue is created, so that no queue changes from plain to shadow doorbells with
//! commands in flight.

use crate::admin::{Admin, AdminQueue};
use crate::device::{AdminQueues, Device};
use crate::dma::BufferPool;
use crate::error::{AttachError, CommandError};
use crate::namespace::Namespace;
use crate::options::{AttachOptions, Doorbells};
use crate::queue::{Bell, Core, Pair, PairShape, QueueMemory, QueuePair, Register, SpinPolicy};
use crate::recovery::{Keeper, Place};
use crate::shared::{Control, Late, ShadowPages, Shared};
use crate::transport::{Transport, TransportError};
use shadowbell_doorbell::RingSize;
use shadowbell_memory::EventFd;
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DoorbellBufferConfig, Identify, SetFeatures};
use shadowbell_spec::feature::{AsyncEventConfig, NumberOfQueues, fid};
use shadowbell_spec::identify::{IDENTIFY_SIZE, IdentifyController, cns};
use shadowbell_spec::{Sqe, dbbuf, regs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::FromBytes;

/// Entries of the admin queues.
const ADMIN_ENTRIES: u16 = 64;
/// The most that an admin command moves, where the controller takes more.
const ADMIN_TRANSFER: u64 = 128 * 1024;
/// Asynchronous Event Requests to have outstanding, where the controller takes as many.
const EVENT_REQUESTS: u8 = 4;
/// Pages beside the admin queues: the Shadow Doorbell buffer and the EventIdx buffer.
const SHADOW_VALUES: u64 = 0;
const SHADOW_EVENT_IDXS: u64 = 1;

/// What a queue has at least. Base 2.1, 3.3.3.1.
const SMALLEST: RingSize = match RingSize::new(RingSize::MIN) {
    Some(size) => size,
    None => panic!("the smallest size of a ring is a size of a ring"),
};

/// Everything that an attach brings about.
pub(crate) struct Attached {
    pub(crate) shared: Arc<Shared>,
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) queues: Vec<QueuePair>,
    /// What the admin queue's interrupt signals.
    pub(crate) admin_event: Option<EventFd>,
}

/// Attaches; a second time if the controller goes fatal in the first.
///
/// Its first access to memory may meet what the driver before us left behind: a translation that an
/// IOMMU still serves, right after the device has changed hands. Once the controller was reset,
/// nothing of that is left.
pub(crate) fn attach(
    transport: Arc<dyn Transport>,
    options: &AttachOptions,
) -> Result<Attached, AttachError> {
    options.check()?;
    match attempt(&transport, options) {
        Err(Failure { error, fatal: true }) => {
            tracing::warn!("{error}; resetting it and trying once more");
            // Disabling it, which comes first in an attempt, is a reset as well.
            if let Err(error) = transport.reset() {
                tracing::debug!("{error}");
            }
            attempt(&transport, options).map_err(|failure| failure.error)
        }
        outcome => outcome.map_err(|failure| failure.error),
    }
}

/// Why an attempt to attach failed, and whether the controller reported a fatal status (CSTS.CFS)
/// then; once it is disabled again it does not.
struct Failure {
    error: AttachError,
    fatal: bool,
}

fn attempt(transport: &Arc<dyn Transport>, options: &AttachOptions) -> Result<Attached, Failure> {
    let shared = admin_queue(Arc::clone(transport), options).map_err(|error| {
        let fatal = matches!(error, AttachError::Fatal { .. });
        Failure { error, fatal }
    })?;
    set_up(&shared, options).map_err(|error| {
        let fatal = shared.device.registers().is_ok_and(|registers| {
            // All ones are no status, but those of a device that is gone.
            registers.csts.cfs() && registers.csts.into_bits() != u32::MAX
        });
        Failure { error, fatal }
    })
}

/// From an enabled controller to one with queues.
fn set_up(shared: &Arc<Shared>, options: &AttachOptions) -> Result<Attached, AttachError> {
    let admin = Admin::new(Arc::clone(shared));
    let admin_event = admin_interrupt(shared, options)?;

    let at = |step| move |source| AttachError::Command { step, source };
    let identity = admin.identify_controller().map_err(at("Identify Controller"))?;
    let max_transfer = max_transfer(&shared.device, &identity, options.max_transfer_bytes);
    shared.admin.limit_transfer(max_transfer);
    let granted = request_queues(shared, options.queue_pairs).map_err(at("Number of Queues"))?;
    let (doorbells, shadow) = configure_doorbells(shared, &identity, options.doorbells);
    let namespaces =
        admin.identify_namespaces(&identity, max_transfer).map_err(at("Identify Namespace"))?;

    let (largest, shape) = io_shape(&shared.device, options, max_transfer);
    let transport = &shared.device.transport;
    let io_memory = QueueMemory::new(transport, shape, granted.into(), 0)?;
    let interrupts = admin_event.is_some();
    let identity = Box::new(identity);
    let late =
        Late { identity, doorbells, shadow, max_transfer, io_memory, granted, largest, interrupts };
    // Nobody else has seen `shared`, so nobody else has set it.
    let _ = shared.late.set(late);

    let mut queues = Vec::with_capacity(granted.into());
    for _ in 0..granted {
        queues.push(create_queue_pair(shared, largest, options.spin)?);
    }
    listen(shared).map_err(at("Asynchronous Event Request"))?;
    if options.recovery.enabled {
        let keeper = Keeper::spawn(shared, shared.pace.tick).map_err(AttachError::Thread)?;
        // As above.
        let _ = shared.keeper.set(keeper);
    }
    Ok(Attached { shared: Arc::clone(shared), namespaces, queues, admin_event })
}

/// Disables the controller, and enables it with an admin queue of ours.
fn admin_queue(
    transport: Arc<dyn Transport>,
    options: &AttachOptions,
) -> Result<Arc<Shared>, AttachError> {
    let device = Device::probe(Arc::clone(&transport), options.page_size, options.timeouts)?;
    device.disable().map_err(|not| device.attach_error("disabling", not))?;

    let impossible = || AttachError::Unsupported {
        device: device.name().to_owned(),
        what: format!("has a doorbell stride or page size ({} bytes)", device.page),
    };
    let size = RingSize::new(ADMIN_ENTRIES.into()).ok_or_else(impossible)?;
    let shape = PairShape { sq: size, cq: size, max_transfer: ADMIN_TRANSFER, page: device.page };
    let memory = QueueMemory::new(&transport, shape, 1, 2)?;
    let AdminPair { core, queues } = admin_pair(&device, &memory).ok_or_else(impossible)?;
    let scratch = BufferPool::new(
        &transport,
        usize::from(ADMIN_ENTRIES),
        shadowbell_spec::identify::IDENTIFY_SIZE,
        device.page as usize,
    )?;
    let admin = AdminQueue::new(core);
    let shared = Arc::new(Shared::new(device, admin, memory, scratch, options.recovery));
    shared.begin();
    shared.device.enable(queues).map_err(|not| shared.device.attach_error("enabling", not))?;
    let stuck = shared.device.csts().is_ok_and(|csts| csts.nssro());
    shared.nssro_stuck.store(stuck, Ordering::Relaxed);
    Ok(shared)
}

/// The admin queues, as the controller has not seen them yet.
pub(crate) struct AdminPair {
    pub(crate) core: Core,
    pub(crate) queues: AdminQueues,
}

/// Admin queues in `memory`, zeroed.
pub(crate) fn admin_pair(device: &Device, memory: &QueueMemory) -> Option<AdminPair> {
    let transport = &device.transport;
    let dstrd = device.cap.dstrd();
    let bell = |offset| {
        Bell::new(Register::Trapped { transport: Arc::clone(transport), offset, event: None })
    };
    // The admin queue is control: it takes the way that can wake a controller, mapped or not.
    let bells = [regs::sq_doorbell_offset(0, dstrd), regs::cq_doorbell_offset(0, dstrd)].map(bell);
    let size = RingSize::new(ADMIN_ENTRIES.into())?;
    let Pair { core, sq_iova, cq_iova, .. } = memory.pair(0, 0, size, bells)?;
    let queues = AdminQueues {
        asq: sq_iova,
        acq: cq_iova,
        sq_entries: ADMIN_ENTRIES,
        cq_entries: ADMIN_ENTRIES,
    };
    Some(AdminPair { core, queues })
}

fn admin_interrupt(
    shared: &Shared,
    options: &AttachOptions,
) -> Result<Option<EventFd>, AttachError> {
    if !options.interrupts {
        return Ok(None);
    }
    if shared.device.transport.irq_vectors() == 0 {
        tracing::info!("{} raises no interrupts; polling for completions", shared.name());
        return Ok(None);
    }
    let event = EventFd::new().map_err(AttachError::Event)?;
    shared.set_irq(0, &event)?;
    // After a reset it is set again.
    let _ = shared.admin_event.set(event.try_clone().map_err(AttachError::Event)?);
    Ok(Some(event))
}

/// The most that one command moves: MDTS counts pages of CAP.MPSMIN. Base 2.1, 5.1.13.2.1.
fn max_transfer(device: &Device, identity: &IdentifyController, wanted: u64) -> u64 {
    let told = match identity.mdts {
        0 => u64::MAX,
        mdts => 1u64
            .checked_shl(12 + u32::from(device.cap.mpsmin()) + u32::from(mdts))
            .unwrap_or(u64::MAX),
    };
    wanted.min(told)
}

/// Set Features, Number of Queues (07h): as many pairs as wanted, or as the controller has.
fn request_queues(shared: &Shared, wanted: u16) -> Result<u16, CommandError> {
    let ask = NumberOfQueues::new().with_nsq(wanted - 1).with_ncq(wanted - 1);
    let answer = set_feature(shared, fid::NUMBER_OF_QUEUES, ask.into_bits())?;
    let answer = NumberOfQueues::from_bits(answer);
    // 0's based, so one of each at least; and more than were asked for are none of our business.
    let granted = answer.nsq().min(answer.ncq()).saturating_add(1).min(wanted);
    if granted < wanted {
        tracing::info!("asked for {wanted} queue pairs, got {granted}");
    }
    Ok(granted)
}

/// Chooses how doorbells are rung, and sends Doorbell Buffer Config if that is how. One line in the
/// log if it is not what was wanted.
fn configure_doorbells(
    shared: &Shared,
    identity: &IdentifyController,
    wanted: Doorbells,
) -> (Doorbells, Option<ShadowPages>) {
    let name = shared.name();
    let has_page = shared.device.transport.doorbell_page().is_some();
    if matches!(wanted, Doorbells::Auto | Doorbells::Shadow) {
        if identity.oacs.doorbell_buffer_config() {
            match shadow_doorbells(shared) {
                Ok(pages) => return (Doorbells::Shadow, Some(pages)),
                Err(why) => {
                    tracing::warn!("{name} refused shadow doorbells, using plain ones: {why}");
                }
            }
        } else if wanted == Doorbells::Shadow || !has_page {
            tracing::info!("{name} has no shadow doorbells, using plain ones");
        }
    }
    match wanted {
        Doorbells::Auto | Doorbells::Mapped if has_page => (Doorbells::Mapped, None),
        Doorbells::Mapped => {
            tracing::info!("the doorbells of {name} can not be mapped, using plain ones");
            (Doorbells::Mmio, None)
        }
        _ => (Doorbells::Mmio, None),
    }
}

fn shadow_doorbells(shared: &Shared) -> Result<ShadowPages, String> {
    let dstrd = shared.device.cap.dstrd();
    if dbbuf::queue_pairs_in_page(shared.device.page, dstrd) == 0 {
        return Err(format!("not even the admin queue has room in a page (CAP.DSTRD {dstrd})"));
    }
    let memory = shared.admin_memory();
    let no_page = || "no memory for the buffers".to_owned();
    let (values, shadow) = memory.page(SHADOW_VALUES).ok_or_else(no_page)?;
    let (event_idxs, event_idx) = memory.page(SHADOW_EVENT_IDXS).ok_or_else(no_page)?;
    let pages = ShadowPages { values, event_idxs, dstrd };
    let [sq, cq] = pages.of(0).ok_or_else(no_page)?;
    // The admin queue is shadowed as well (Base 2.1, "Doorbell Buffer Config command"), and there are
    // controllers that leave it out, SPDK's for one. Its doorbells are written both ways for good.
    shared.admin.mirror(sq, cq);
    let config = Sqe::dbbuf_config(DoorbellBufferConfig { shadow, event_idx }, 0);
    let outcome = shared.command(config, None, 0, shared.device.timeouts.admin);
    outcome.map(|_| pages).map_err(|error| {
        shared.admin.forget_shadow();
        error.to_string()
    })
}

fn io_shape(device: &Device, options: &AttachOptions, max_transfer: u64) -> (RingSize, PairShape) {
    // CAP.MQES was checked: both are in the range of a ring.
    let most = u32::from(device.cap.mqes()) + 1;
    let entries = |wanted: u32| RingSize::new(wanted.min(most)).unwrap_or(SMALLEST);
    let sq = entries(options.queue_depth);
    // A completion queue of twice the length has its head given back half as often.
    let cq = entries(options.queue_depth.saturating_mul(2).min(RingSize::MAX));
    (sq, PairShape { sq, cq, max_transfer, page: device.page })
}

/// Creates the queue pair with the lowest free identifier. Base 2.1, 5.2.1 and 5.2.2: the
/// completion queue comes first.
pub(crate) fn create_queue_pair(
    shared: &Arc<Shared>,
    size: RingSize,
    spin: SpinPolicy,
) -> Result<QueuePair, AttachError> {
    let step = "creating an I/O queue pair";
    let nonsense = |what: &str| AttachError::Command {
        step,
        source: CommandError::Nonsense {
            device: shared.name().to_owned(),
            command: "Create I/O Completion Queue".into(),
            what: what.into(),
        },
    };
    let late = shared.late.get().ok_or_else(|| nonsense("it was not identified"))?;
    let mut control = shared.control();
    if let Err(source) = shared.usable(0) {
        let source = CommandError::Queue { command: "Create I/O Completion Queue".into(), source };
        return Err(AttachError::Command { step, source });
    }
    let Some(qid) = control.free_qid(late.granted) else {
        return Err(AttachError::Option {
            option: "queue_pairs",
            value: late.granted.into(),
            why: "the controller grants no more, and all are in use",
        });
    };
    let impossible = || nonsense("its queues have no room in memory");
    let bells = shared.fresh_bells(qid).ok_or_else(impossible)?;
    let Pair { mut core, sq, sq_iova, cq, cq_iova } =
        late.io_memory.pair(u64::from(qid) - 1, qid, size, bells).ok_or_else(impossible)?;
    core.set_repeats(shared.recovery.repeats);
    let event = EventFd::new().map_err(AttachError::Event)?;
    let interrupts = late.interrupts && u32::from(qid) < shared.device.transport.irq_vectors();
    if late.interrupts && !interrupts {
        tracing::info!(qid, "no interrupt vector is left for this queue pair; polling");
    }
    let place = Place { qid, sq, sq_iova, cq, cq_iova, interrupts };
    let generation = shared.generation();
    connect(shared, &mut control, place, &event)?;
    // Known as created from the first command on: one that timed out may have worked.
    control.created.insert(qid);
    let created = create_at(shared, &mut control, place);
    drop(control);
    if let Err(error) = created {
        shared.withdraw_queue_pair(qid, &error);
        return Err(AttachError::Command { step, source: error });
    }
    let [sq, cq] = shared.ringers(qid);
    core.sq_bell.ring_by(sq);
    core.cq_bell.ring_by(cq);
    Ok(QueuePair::new(core, Arc::clone(shared), place, generation, event, spin))
}

/// Has the interrupt of a queue pair, if it has one, signal `event`.
pub(crate) fn connect(
    shared: &Shared,
    control: &mut Control,
    place: Place,
    event: &EventFd,
) -> Result<(), TransportError> {
    if place.interrupts {
        shared.device.transport.set_irq(place.qid.into(), Some(event))?;
        control.vectors.insert(place.qid);
    }
    Ok(())
}

/// Creates the queues of a pair at the controller. Base 2.1, 5.2.1 and 5.2.2: the completion queue
/// comes first.
pub(crate) fn create_at(
    shared: &Shared,
    control: &mut Control,
    place: Place,
) -> Result<(), CommandError> {
    let Place { qid, interrupts, .. } = place;
    let cq = CreateIoCq {
        qid,
        qsize0: zero_based(place.cq),
        pc: true,
        ien: interrupts,
        iv: if interrupts { qid } else { 0 },
    };
    let sq =
        CreateIoSq { qid, qsize0: zero_based(place.sq), pc: true, cqid: qid, ..Default::default() };
    let limit = shared.device.timeouts.admin;
    control.live.insert(qid);
    shared.command(Sqe::create_io_cq(cq, place.cq_iova, 0), None, 0, limit)?;
    shared.command(Sqe::create_io_sq(sq, place.sq_iova, 0), None, 0, limit)?;
    Ok(())
}

fn zero_based(size: RingSize) -> u16 {
    u16::try_from(size.entries() - 1).unwrap_or(u16::MAX)
}

/// Has the controller tell of what it can tell, and asks it to.
fn listen(shared: &Shared) -> Result<(), CommandError> {
    let Some(late) = shared.late.get() else { return Ok(()) };
    let oaes = late.identity.oaes;
    let config = AsyncEventConfig::new()
        // The critical warnings that every controller has.
        .with_smart(0x1f)
        .with_nan(oaes.nsan())
        .with_fan(oaes.fan());
    if let Err(error) = set_feature(shared, fid::ASYNC_EVENT_CONFIGURATION, config.into_bits()) {
        // Mandatory, but not worth a refusal: what the controller tells unasked still arrives.
        tracing::info!("asynchronous events stay as the controller has them: {error}");
    }
    let requests = EVENT_REQUESTS.min(late.identity.aerl.saturating_add(1));
    shared.admin.request_events(requests).map_err(|source| CommandError::Queue {
        command: "Asynchronous Event Request".into(),
        source,
    })
}

fn set_feature(shared: &Shared, fid: u8, value: u32) -> Result<u32, CommandError> {
    let fields = SetFeatures { fid, cdw11: value, ..SetFeatures::default() };
    let sqe = Sqe::set_features(0, fields, 0);
    Ok(shared.command(sqe, None, 0, shared.device.timeouts.admin)?.dw0)
}

/// Configures a controller that was reset as it was: everything but its I/O queues. The reason, if
/// it is not the controller that it was.
pub(crate) fn configure_again(shared: &Shared) -> Result<(), String> {
    let late = shared.late.get().ok_or("it was not identified before")?;
    let told = |error: CommandError| error.to_string();
    let identity = identify_again(shared).map_err(told)?;
    if (identity.sn, identity.mn) != (late.identity.sn, late.identity.mn) {
        return Err("another controller is in its place".into());
    }
    let granted = request_queues(shared, late.granted).map_err(told)?;
    if granted < late.granted {
        return Err(format!("it grants {granted} queue pairs, and {} before", late.granted));
    }
    if late.shadow.is_some() {
        shadow_doorbells(shared)?;
    }
    listen(shared).map_err(told)
}

fn identify_again(shared: &Shared) -> Result<IdentifyController, CommandError> {
    let sqe = Sqe::identify(0, Identify { cns: cns::CONTROLLER, ..Identify::default() }, 0);
    let nonsense = |what: &str| CommandError::Nonsense {
        device: shared.name().to_owned(),
        command: "Identify".into(),
        what: what.into(),
    };
    let buffer = shared.scratch.take().ok_or_else(|| nonsense("there is no buffer for it"))?;
    let size = IDENTIFY_SIZE;
    let limit = shared.device.timeouts.admin;
    let completion = shared.command(sqe, Some(buffer), size as u32, limit)?;
    let data = completion.buffer.map(|buffer| buffer.to_vec(size)).unwrap_or_default();
    IdentifyController::read_from_bytes(&data).map_err(|_| nonsense("its data are too short"))
}
