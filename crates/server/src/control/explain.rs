//! Explanation requests: causes for which the commands of a controller wait.

use super::controllers::{controller, state as state_of};
use super::disks::disks;
use super::lookup::find;
use super::state::ServerState;
use crate::registry::ServedController;
use shadowbell_control_api::api::{Controller, ControllerState, Disk, Problem};
use shadowbell_control_api::explain::{ExplainedDisk, ExplainedThread, Explanation, Shares};
use shadowbell_controller::stats::SleepStats;
use shadowbell_disk_layers::LimitedDisk;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time that an explanation is about.
const TIME: Duration = Duration::from_secs(1);

/// Explain what the commands of a controller wait for
///
/// The request takes one second, in which the outstanding commands are sampled. Commands cost
/// nothing for that.
#[utoipa::path(get, path = "/v1/controllers/{id}/explain", operation_id = "explain",
    tag = "controllers",
    params(("id" = String, Path, description = "The controller's `id`")),
    responses(
        (status = 200, description = "Shares of the second by cause, figures, and three sentences",
            body = Explanation),
        (status = 404, description = "No such controller", body = Problem)
    ))]
pub(super) fn explain(state: &ServerState, id: &str) -> Result<Explanation, Problem> {
    let about = controller(state, id)?;
    if about.state == ControllerState::Waiting {
        return Ok(empty(about).explained());
    }
    let read = |served: &ServedController| {
        let ServedController { controller, .. } = served;
        let sampled = state.waits.read(&state.changes).remove(&controller.number());
        let sampled = sampled.unwrap_or_default();
        (Instant::now(), sampled, controller.io_commands(), controller.stats().workers)
    };
    // No reference to the controller is held meanwhile, so that it can be removed.
    let (began, before, commands, workers) = read(&*find(state, id)?);
    std::thread::sleep(TIME);
    let served = find(state, id)?;
    let (ended, now, commands_now, workers_now) = read(&served);
    let time = ended.saturating_duration_since(began);
    // The state may have changed meanwhile.
    let about =
        Controller { state: state_of(&served.controller), client: served.has_client(), ..about };
    let explanation = Explanation {
        seconds: time.as_secs_f64(),
        shares: Shares::between(&before.waits, &now.waits),
        commands: commands_now.saturating_sub(commands),
        queued: now.outstanding.queued.into(),
        in_flight: now.outstanding.in_flight.into(),
        capacity: now.outstanding.capacity.into(),
        disks: explained_disks(state, &served),
        io_threads: threads(state, &workers, &workers_now, time),
        ..empty(about)
    };
    Ok(explanation.explained())
}

/// Explanation without figures.
fn empty(about: Controller) -> Explanation {
    Explanation {
        controller: about.id,
        seconds: 0.0,
        state: about.state,
        client: about.client,
        waits_for: about.waits_for,
        shares: Shares::default(),
        commands: 0,
        queued: 0,
        in_flight: 0,
        capacity: 0,
        disks: Vec::new(),
        io_threads: Vec::new(),
        sentences: Vec::new(),
    }
}

fn explained_disks(state: &ServerState, served: &ServedController) -> Vec<ExplainedDisk> {
    let limited: BTreeMap<u32, u64> = served
        .controller
        .namespaces()
        .into_iter()
        .filter_map(|(nsid, namespace)| Some((nsid, LimitedDisk::of(&*namespace.disk)?.waiting())))
        .collect();
    let disks = disks(state).into_iter().filter_map(|disk| {
        let user = disk.namespaces.iter().find(|user| user.controller == served.id)?;
        let limited = limited.get(&user.nsid).copied().unwrap_or(0);
        let Disk { id, source, stalled, stopped, held, in_flight, oldest_ms, limits, .. } = disk;
        Some(ExplainedDisk {
            id,
            source,
            stalled,
            stopped,
            held,
            limited,
            in_flight,
            oldest_ms,
            limits,
        })
    });
    disks.collect()
}

fn threads(
    state: &ServerState,
    before: &[SleepStats],
    now: &[SleepStats],
    time: Duration,
) -> Vec<ExplainedThread> {
    let mut controllers: BTreeMap<usize, usize> = BTreeMap::new();
    for served in state.controllers.all() {
        for thread in served.controller.stats().workers {
            *controllers.entry(thread.worker).or_default() += 1;
        }
    }
    let explained = now.iter().map(|thread| {
        let before = before.iter().find(|before| before.worker == thread.worker);
        let awake = before.map_or(0, |before| thread.awake_ns.saturating_sub(before.awake_ns));
        let awake = Duration::from_nanos(awake).as_secs_f64() / time.as_secs_f64();
        let controllers = controllers.get(&thread.worker).copied().unwrap_or(0);
        ExplainedThread { worker: thread.worker, awake: awake.min(1.0), controllers }
    });
    explained.collect()
}
