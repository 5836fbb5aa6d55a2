//! Attaching: controller initialization from any state up to I/O queues.
//!
//! Base 2.1, 3.5.1 "Memory-based Controller Initialization". Each stage owns the result of the
//! previous stage: a [`Device`](crate::device::Device) with its registers, an [`EnabledController`]
//! with an admin queue, [`ControllerInfo`] from Identify, an [`AttachedController`] with I/O queue
//! pairs.

use crate::admin::{identify_controller, identify_namespaces};
use crate::attached_controller::AttachedController;
use crate::configure::{
    configure_doorbells, enable_extended_formats, max_transfer, request_events, request_queues,
};
use crate::controller_state::ControllerInfo;
use crate::enabled_controller::EnabledController;
use crate::error::{AttachError, CommandError};
use crate::io_queues::io_queue_memory;
use crate::namespace::Namespace;
use crate::options::AttachOptions;
use crate::queue_pair::QueuePair;
use crate::recovery::{WatchIntervals, Watchdog, WatchedController};
use crate::transport::Transport;
use std::sync::{Arc, Weak};

/// Result of an attach.
pub(crate) struct Attached {
    pub(crate) controller: Arc<AttachedController>,
    pub(crate) namespaces: Vec<Namespace>,
    /// Created queue pairs, in ascending order of their identifiers.
    pub(crate) queues: Vec<QueuePair>,
}

/// Attaches to the controller; retries once if the controller reports a fatal status.
///
/// The first DMA of the controller can hit a stale IOMMU translation of the previous driver, right
/// after the device has changed owners. A controller reset removes stale translations.
pub(crate) fn attach(
    transport: Arc<dyn Transport>,
    options: &AttachOptions,
) -> Result<Attached, AttachError> {
    options.check()?;
    match attempt(&transport, options) {
        Err(AttemptError { error, fatal: true }) => {
            tracing::warn!("{error}; resetting it and trying once more");
            // The second attempt is made even if the transport cannot reset the function: each
            // attempt begins by disabling the controller, and that is a controller reset as well.
            if let Err(error) = transport.reset() {
                tracing::debug!("{error}");
            }
            attempt(&transport, options).map_err(|failure| failure.error)
        }
        outcome => outcome.map_err(|failure| failure.error),
    }
}

/// Failed attempt to attach, with the fatal status (CSTS.CFS) at the time of the failure. The
/// status is read before the controller is disabled, because disabling clears the status.
struct AttemptError {
    error: AttachError,
    fatal: bool,
}

impl AttemptError {
    /// Creates the error of an attempt that failed after the controller was enabled, with the value
    /// that CSTS.CFS has now.
    fn of(error: AttachError, enabled: &EnabledController) -> Self {
        let csts = enabled.admin.device.csts();
        // A removed device reads as all ones, which is not a status.
        let fatal = csts.is_ok_and(|csts| csts.cfs() && csts.into_bits() != u32::MAX);
        Self { error, fatal }
    }
}

fn attempt(
    transport: &Arc<dyn Transport>,
    options: &AttachOptions,
) -> Result<Attached, AttemptError> {
    let enabled = EnabledController::enable(Arc::clone(transport), options).map_err(|error| {
        let fatal = matches!(error, AttachError::Fatal { .. });
        AttemptError { error, fatal }
    });
    let mut enabled = enabled?;
    let (info, namespaces) = match identify(&mut enabled, options) {
        Ok(identified) => identified,
        Err(error) => return Err(AttemptError::of(error, &enabled)),
    };
    let controller = Arc::new(AttachedController::new(enabled, info, options.recovery));
    match create_queues(&controller, options) {
        Ok(queues) => Ok(Attached { controller, namespaces, queues }),
        Err(error) => Err(AttemptError::of(error, &controller.enabled)),
    }
}

/// Identifies and configures an enabled controller, and allocates memory for its I/O queues.
fn identify(
    enabled: &mut EnabledController,
    options: &AttachOptions,
) -> Result<(ControllerInfo, Vec<Namespace>), AttachError> {
    if options.interrupts {
        enabled.connect_admin_interrupt()?;
    }
    let (admin, interrupts) = (&enabled.admin, enabled.admin_event.is_some());
    let identity = identify_controller(admin).map_err(at("Identify Controller"))?;
    let max_transfer = max_transfer(&admin.device, &identity, options.max_transfer_bytes);
    admin.queue.limit_transfer(max_transfer);
    let granted = request_queues(admin, options.queue_pairs).map_err(at("Number of Queues"))?;
    let (doorbells, shadow) = configure_doorbells(admin, &identity, options.doorbells);
    enable_extended_formats(admin, &identity);
    let namespaces = identify_namespaces(admin, &identity, max_transfer);
    let namespaces = namespaces.map_err(at("Identify Namespace"))?;
    let (io_memory, largest) = io_queue_memory(&admin.device, options, max_transfer, granted)?;
    let identity = Box::new(identity);
    let info = ControllerInfo {
        identity,
        doorbells,
        shadow,
        max_transfer,
        io_memory,
        granted,
        largest,
        interrupts,
    };
    Ok((info, namespaces))
}

/// Creates the I/O queue pairs of a configured controller, requests events, starts the watchdog.
fn create_queues(
    controller: &Arc<AttachedController>,
    options: &AttachOptions,
) -> Result<Vec<QueuePair>, AttachError> {
    let info = &controller.info;
    let mut queues = Vec::with_capacity(info.granted.into());
    for _ in 0..info.granted {
        queues.push(QueuePair::create(controller, info.largest, options.spin)?);
    }
    let requested = request_events(&controller.enabled.admin, &info.identity);
    requested.map_err(at("Asynchronous Event Request"))?;
    if options.recovery.enabled {
        let target: Weak<dyn WatchedController> = Arc::<AttachedController>::downgrade(controller);
        let (tick, status) = (controller.ticks.tick, controller.recovery.watch);
        let watchdog = Watchdog::spawn(target, WatchIntervals { tick, status });
        controller.set_watchdog(watchdog.map_err(AttachError::Thread)?);
    }
    Ok(queues)
}

fn at(step: &'static str) -> impl FnOnce(CommandError) -> AttachError {
    move |source| AttachError::Command { step, source }
}
