//! Reconnection thread: replaces lost connections and does all work that may block for long.

use crate::connections::Connections;
use crate::link::{Link, Loss};
use crate::replay::{ReplayError, replay};
use crate::stream::{Patient, Stream};
use crate::unflushed::Flush;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_memory::AbortOnPanic;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// Shortest and longest delay between two attempts to connect.
const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(2);
/// Longest delay between two attempts if a connection was made and could not be used, or if the
/// server is shutting down.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Interval between two warnings that the server is unavailable.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum wait for replies on the remaining connections after one was lost.
const DRAIN: Duration = Duration::from_secs(10);
/// Maximum duration of a replay.
const REPLAY: Duration = Duration::from_secs(120);

/// Main loop of the thread, until the disk is closed.
pub(crate) fn run(connections: &Connections) {
    let _guard = AbortOnPanic::new();
    let shared = &connections.shared;
    let mut pause = FIRST;
    let mut lost_since: Option<Instant> = None;
    let mut reported_at: Option<Instant> = None;
    loop {
        let is_whole = || connections.links.iter().all(|link| link.lock().is_connected());
        if is_whole() && !shared.is_server_ending() {
            flush(connections);
            if !wait(connections, None) {
                break;
            }
            continue;
        }
        let lost = *lost_since.get_or_insert_with(Instant::now);
        match reconnect(connections) {
            Ok(()) => {
                pause = FIRST;
                if is_whole() {
                    let took = lost.elapsed();
                    info!("{}: reconnected after {} ms", shared.name, took.as_millis());
                    (lost_since, reported_at) = (None, None);
                }
            }
            Err(Failure { why, max_pause }) => {
                if reported_at.is_none_or(|reported_at| reported_at.elapsed() >= REPORT_INTERVAL) {
                    warn!("{}: requests wait for a new connection: {why}", shared.name);
                    reported_at = Some(Instant::now());
                }
                pause = pause.min(max_pause);
                if !wait(connections, Some(pause)) {
                    break;
                }
                pause *= 2;
            }
        }
    }
    for link in &connections.links {
        if let Some(stream) = link.lock().stream() {
            stream.send_disconnect();
        }
    }
}

/// Sends a flush that makes the unflushed writes durable, so that they can be dropped. The queues
/// may be idle, so this thread receives the reply.
fn flush(connections: &Connections) {
    let Some(link) = connections.links.first() else { return };
    let mut link = link.lock();
    let mut unflushed = connections.shared.unflushed.lock();
    if unflushed.flush == Flush::Requested {
        unflushed.flush = Flush::InFlight;
        drop(unflushed);
        link.push_flush();
        link.pump(&connections.shared, None);
    }
}

/// Waits for an event, but at most for `pause`. Returns false if the disk was closed.
fn wait(connections: &Connections, pause: Option<Duration>) -> bool {
    let shared = &connections.shared;
    let until = pause.map(|pause| Instant::now() + pause);
    loop {
        let streams: Vec<Option<Stream>> =
            connections.links.iter().map(|link| link.lock().stream()).collect();
        let connected = || streams.iter().flatten();
        let mut fds = vec![PollFd::new(&shared.stop, PollFlags::IN)];
        // During a pause, `wake` is not watched, because the pending work is known already.
        let wanted = if pause.is_none() { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::new(&shared.wake, wanted));
        fds.extend(connected().map(|stream| PollFd::new(stream, PollFlags::RDHUP)));
        // This thread also receives the replies to its own flush and to orphans (cancelled writes),
        // because the queues may be idle or closed.
        let has_own =
            !shared.orphans.is_empty() || shared.unflushed.lock().flush == Flush::InFlight;
        let of_own = |link: &Mutex<Link>| link.lock().unattended();
        let own: Vec<_> = match has_own {
            true => connections.links.iter().map(of_own).collect(),
            false => Vec::new(),
        };
        for (stream, sends) in own.iter().flatten() {
            let out = if *sends { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::new(stream, PollFlags::IN | out));
        }
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let ready = poll(&mut fds, timeout.as_ref());
        let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
        if events.next() == Some(true) {
            return false;
        }
        if events.next() == Some(true) && pause.is_none() {
            shared.wake.drain();
            return true;
        }
        let gone: Vec<bool> = events.collect();
        let mut gone = gone.into_iter();
        for (link, stream) in connections.links.iter().zip(&streams) {
            if stream.is_some() && gone.next() == Some(true) {
                link.lock().hung_up(shared);
            }
        }
        for (link, _) in connections.links.iter().zip(&own).filter(|(_, own)| own.is_some()) {
            if gone.next() == Some(true) {
                let mut link = link.lock();
                link.receive(shared, None);
                link.pump(shared, None);
            }
        }
        if ready == Ok(0) {
            return true;
        }
    }
}

/// Reason for a failed attempt to connect, and the longest delay before the next attempt.
struct Failure {
    why: String,
    max_pause: Duration,
}

/// Ends all connections that have no request in flight. Called during a recovery, when no request
/// may be sent on them.
fn disconnect_all(connections: &Connections) {
    connections.links.iter().for_each(|link| link.lock().disconnect());
}

/// Makes a new connection in place of a lost one.
fn reconnect(connections: &Connections) -> Result<(), Failure> {
    let shared = &connections.shared;
    let is_recovering = shared.is_recovering();
    if is_recovering {
        drain(connections);
    }
    if shared.take_server_ending() {
        disconnect_all(connections);
        let why = "the server is shutting down".to_owned();
        return Err(Failure { why, max_pause: FIRST_PAUSE });
    }
    let settle = connections.connector.spec.settle.unwrap_or_default();
    if let Some(rest) = shared.unsettled(settle) {
        let why = "the server may still execute writes of the lost connection".to_owned();
        return Err(Failure { why, max_pause: rest.max(FIRST) });
    }
    let losses = shared.losses.load(Ordering::SeqCst);
    let (stream, export) = connections.connector.connect(&shared.stop).map_err(|error| {
        // A server that accepts no connection may be shutting down, and may wait until its last
        // clients have disconnected.
        if shared.is_recovering() && error.is_absence() {
            disconnect_all(connections);
        }
        Failure { why: error.to_string(), max_pause: LONGEST }
    })?;
    if let Some(what) = export.lacks(&connections.first, connections.part, connections.links.len())
    {
        let why = format!(
            "the server no longer supports {what}; start it with the same options as before"
        );
        return Err(Failure { why, max_pause: LONGEST });
    }
    if shared.is_recovering() {
        if !is_recovering {
            // A connection was lost after `drain` was skipped above. Before a replay, the requests
            // in flight on the remaining connections must end. The next attempt first waits for
            // them.
            let why = "another connection was lost meanwhile".to_owned();
            return Err(Failure { why, max_pause: FIRST_PAUSE });
        }
        resend(connections, &stream, export.structured)
            .map_err(|why| Failure { why, max_pause: FIRST_PAUSE })?;
        if !shared.recovered(losses) {
            let why = "another connection was lost meanwhile".to_owned();
            return Err(Failure { why, max_pause: FIRST_PAUSE });
        }
    }
    let before = std::mem::replace(&mut *shared.export.lock(), export.clone()).size;
    if before != export.size {
        info!("{}: the export now has {} bytes, before {before}", shared.name, export.size);
    }
    shared.reconnections.fetch_add(1, Ordering::Relaxed);
    let mut stream = Some(stream);
    for link in &connections.links {
        let mut link = link.lock();
        if !link.is_connected()
            && let Some(stream) = stream.take()
        {
            link.install(stream, &export, shared);
        } else {
            link.pump(shared, None);
        }
    }
    Ok(())
}

/// Waits for replies on the remaining connections. The server must have executed the requests in
/// flight before the replay starts; otherwise the replay could overwrite their data with older
/// data.
fn drain(connections: &Connections) {
    let shared = &connections.shared;
    let until = Instant::now() + DRAIN;
    loop {
        let busy: Vec<_> = connections.links.iter().map(|link| link.lock().busy()).collect();
        let mut fds = vec![PollFd::new(&shared.stop, PollFlags::IN)];
        for (stream, sends) in busy.iter().flatten() {
            let out = if *sends { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN | out));
        }
        if fds.len() == 1 {
            return;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            for (link, _) in connections.links.iter().zip(&busy).filter(|(_, busy)| busy.is_some())
            {
                link.lock().set_lost(shared, &Loss::Silent, None);
            }
            return;
        }
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let _ = poll(&mut fds, Some(&left));
        if fds.first().is_some_and(|stop| !stop.revents().is_empty()) {
            return;
        }
        for (link, _) in connections.links.iter().zip(&busy).filter(|(_, busy)| busy.is_some()) {
            let mut link = link.lock();
            link.receive(shared, None);
            link.pump(shared, None);
        }
    }
}

/// Replays the unflushed writes: the server has answered them, but may have lost them.
fn resend(connections: &Connections, stream: &Stream, structured: bool) -> Result<(), String> {
    let shared = &connections.shared;
    let entries = shared.unflushed.lock().entries();
    let outcome = match &entries {
        None => Err("`replay=off` keeps no data".to_owned()),
        Some(entries) => {
            let until = Instant::now() + REPLAY;
            let mut patient = Patient { stream, until, stop: &shared.stop };
            match replay(&mut patient, entries, structured) {
                Ok(()) => Ok(entries.len() as u64),
                Err(error @ ReplayError::Lost(_)) => return Err(error.to_string()),
                Err(error @ ReplayError::Refused(_)) => Err(error.to_string()),
            }
        }
    };
    match outcome {
        Ok(count) => shared.unflushed.lock().replayed += count,
        Err(why) => {
            shared.set_lost();
            error!(
                "{}: writes since the last flush may be lost: {why}; flushes fail until the disk \
                 is opened again",
                shared.name
            );
        }
    }
    Ok(())
}
