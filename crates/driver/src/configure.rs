//! Controller configuration between CC.EN and the first I/O queue, when attaching and after a
//! reset.
//!
//! Doorbell Buffer Config is sent before the first I/O queue is created. So no queue changes from
//! plain to shadow doorbells while commands are in flight.

use crate::admin::{AdminCommands, AdminData, AdminPlane, identify_controller};
use crate::command::MAX_BYTES;
use crate::controller_state::ControllerInfo;
use crate::device::Device;
use crate::error::CommandError;
use crate::options::Doorbells;
use crate::queue::ShadowPages;
use shadowbell_spec::admin::{DoorbellBufferConfig, SetFeatures};
use shadowbell_spec::feature::{AsyncEventConfig, HostBehaviorSupport, NumberOfQueues, fid};
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::{Sqe, dbbuf};
use zerocopy::IntoBytes;

/// Number of Asynchronous Event Requests to keep outstanding, if the controller accepts that many.
const EVENT_REQUESTS: u8 = 4;

/// Transfer limit of one command. MDTS counts pages of CAP.MPSMIN (Base 2.1, 5.1.13.2.1).
pub(crate) fn max_transfer(device: &Device, identity: &IdentifyController, wanted: u64) -> u64 {
    let max = match identity.mdts {
        0 => u64::MAX,
        mdts => 1u64
            .checked_shl(12 + u32::from(device.cap.mpsmin()) + u32::from(mdts))
            .unwrap_or(u64::MAX),
    };
    wanted.min(max).min(MAX_BYTES)
}

/// Set Features, Number of Queues (07h): requests `wanted` queue pairs, returns the granted number.
pub(crate) fn request_queues(admin: &AdminPlane, wanted: u16) -> Result<u16, CommandError> {
    let request = NumberOfQueues::new().with_nsq(wanted - 1).with_ncq(wanted - 1);
    let granted_queues = admin.set_feature(fid::NUMBER_OF_QUEUES, 0, request.into_bits())?;
    let granted_queues = NumberOfQueues::from_bits(granted_queues);
    // The values are 0's based, so at least one queue of each kind is granted. Queues beyond the
    // requested number are ignored.
    let granted = granted_queues.nsq().min(granted_queues.ncq()).saturating_add(1).min(wanted);
    if granted < wanted {
        tracing::info!("asked for {wanted} queue pairs, got {granted}");
    }
    Ok(granted)
}

/// Selects the doorbell mode, and sends Doorbell Buffer Config for shadow doorbells. Logs a line if
/// the wanted mode is not available.
pub(crate) fn configure_doorbells(
    admin: &AdminPlane,
    identity: &IdentifyController,
    wanted: Doorbells,
) -> (Doorbells, Option<ShadowPages>) {
    let name = admin.name();
    let has_page = admin.device.transport.doorbell_page().is_some();
    if matches!(wanted, Doorbells::Auto | Doorbells::Shadow) {
        if identity.oacs.doorbell_buffer_config() {
            match shadow_doorbells(admin) {
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
            tracing::info!("the doorbells of {name} cannot be mapped, using plain ones");
            (Doorbells::Mmio, None)
        }
        _ => (Doorbells::Mmio, None),
    }
}

/// Sends Doorbell Buffer Config (Base 2.1, 5.1.6).
fn shadow_doorbells(admin: &AdminPlane) -> Result<ShadowPages, String> {
    let dstrd = admin.device.cap.dstrd();
    if dbbuf::queue_pairs_in_page(admin.device.page, dstrd) == 0 {
        return Err(format!("not even the admin queue has room in a page (CAP.DSTRD {dstrd})"));
    }
    let no_page = || "no memory for the buffers".to_owned();
    let [(values, shadow), (event_idxs, event_idx)] = admin.shadow_memory().ok_or_else(no_page)?;
    let pages = ShadowPages { values, event_idxs, dstrd };
    let [sq, cq] = pages.of(0).ok_or_else(no_page)?;
    // The admin queue is shadowed as well (Base 2.1, "Doorbell Buffer Config command"), but some
    // controllers, such as SPDK's, do not shadow it. So for the admin queue, the driver always
    // writes both the shadow doorbells and the registers.
    admin.queue.attach_shadow(sq, cq);
    let config = Sqe::dbbuf_config(DoorbellBufferConfig { shadow, event_idx }, 0);
    admin.succeed(config, AdminData::None).map(|_| pages).map_err(|error| {
        admin.queue.detach_shadow();
        error.to_string()
    })
}

/// Host Behavior Support, LBAFEE: announces support for extended protection information formats, if
/// the controller has them (Base 2.1, "Host Behavior Support").
pub(crate) fn enable_extended_formats(admin: &AdminPlane, identity: &IdentifyController) {
    if !identity.ctratt.elbas() {
        return;
    }
    let behavior = HostBehaviorSupport { lbafee: 1, ..HostBehaviorSupport::default() };
    let fields = SetFeatures { fid: fid::HOST_BEHAVIOR_SUPPORT, ..SetFeatures::default() };
    let set = Sqe::set_features(0, fields, 0);
    if let Err(error) = admin.succeed(set, AdminData::ToController(behavior.as_bytes())) {
        // The attach continues: namespaces with other formats work.
        tracing::info!("extended protection information formats are not enabled: {error}");
    }
}

/// Enables the asynchronous events of the controller, and sends Asynchronous Event Requests.
pub(crate) fn request_events(
    admin: &AdminPlane,
    identity: &IdentifyController,
) -> Result<(), CommandError> {
    let config = AsyncEventConfig::new()
        // Every controller has the critical warnings of SMART.
        .with_smart(0x1f)
        .with_nan(identity.oaes.nsan())
        .with_fan(identity.oaes.fan());
    let set = admin.set_feature(fid::ASYNC_EVENT_CONFIGURATION, 0, config.into_bits());
    if let Err(error) = set {
        // The feature is mandatory, but events that are enabled by default arrive even if it cannot
        // be set. So the failure is only logged.
        tracing::info!(
            "asynchronous events are not configured, the defaults of the controller apply: {error}"
        );
    }
    let requests = EVENT_REQUESTS.min(identity.aerl.saturating_add(1));
    let sent = admin.queue.request_events(requests);
    sent.map_err(|source| CommandError::not_submitted(AdminOpcode::AsyncEventRequest as u8, source))
}

/// Configures a controller after a reset, except for its I/O queues.
///
/// # Errors
/// A reason: the transport now leads to another controller, or the controller grants or supports
/// less than before.
pub(crate) fn reconfigure(admin: &AdminPlane, info: &ControllerInfo) -> Result<(), String> {
    let why = |error: CommandError| error.to_string();
    let identity = identify_controller(admin).map_err(why)?;
    if (identity.sn, identity.mn) != (info.identity.sn, info.identity.mn) {
        return Err("another controller has replaced it (other serial or model number)".into());
    }
    let granted = request_queues(admin, info.granted).map_err(why)?;
    if granted < info.granted {
        return Err(format!("it grants {granted} queue pairs instead of {}", info.granted));
    }
    if info.shadow.is_some() {
        shadow_doorbells(admin)?;
    }
    enable_extended_formats(admin, &identity);
    request_events(admin, &info.identity).map_err(why)
}
