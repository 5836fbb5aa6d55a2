//! What answers beside the guests: the socket for `top`, and the control socket. Both rest together
//! while another process may take over, and go on together.

use super::config_file::Settings;
use super::control::{ControlSocket, Resting, View};
use super::server::Server;
use super::server_config::ServerConfig;
use super::stats_socket::{self, RestingStats, StatsSocket};
use super::transfer;
use super::worker_link::Asker;
use parking_lot::Mutex;
use shadowbell_state::Parcel;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

/// The sockets while nobody answers.
pub(super) struct Asides {
    stats: Option<RestingStats>,
    /// `None`: the one before has none.
    control: Option<Resting>,
}

/// The threads that answer.
pub(super) struct Answering {
    stats: Option<StatsSocket>,
    control: Option<ControlSocket>,
}

/// What the control socket can do with the process.
#[derive(Clone)]
pub(super) struct Powers {
    pub(super) keeper_pid: Option<u32>,
    pub(super) end: Arc<dyn Fn() + Send + Sync>,
    pub(super) serves_since: Instant,
    pub(super) upgrade_error: Arc<Mutex<Option<String>>>,
    /// In a sandbox: the only way to the keeper.
    pub(super) asks: Option<Asker>,
}

impl Asides {
    /// Listens where that was asked for.
    ///
    /// # Errors
    /// A path can not be had, in a sentence.
    pub(super) fn listen(config: &ServerConfig, keeper_pid: Option<u32>) -> anyhow::Result<Self> {
        let stats = config.stats_socket.as_deref().map(stats_socket::listen).transpose()?;
        Ok(Self {
            stats: stats.map(RestingStats::new),
            control: Some(listen_control(config, keeper_pid)?),
        })
    }

    /// The same for a server that goes on where another has died, whatever can not be had.
    pub(super) fn listen_again(config: &ServerConfig, keeper_pid: Option<u32>) -> Self {
        let stats = config.stats_socket.as_deref().map(stats_socket::listen).transpose();
        let stats = stats.unwrap_or_else(|why| {
            warn!("the counters can not be asked for: {why:#}");
            None
        });
        let control = listen_control(config, keeper_pid)
            .inspect_err(|why| warn!("there is no control socket any more: {why:#}"));
        Self { stats: stats.map(RestingStats::new), control: control.ok() }
    }

    /// Writes down what another process needs to go on.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn save(&self, parcel: &mut Parcel) -> anyhow::Result<()> {
        if let Some(stats) = &self.stats {
            let saved = stats.save(parcel.descriptors())?;
            parcel.add(transfer::STATS, false, &saved)?;
        }
        if let Some(control) = &self.control {
            let saved = control.save(parcel.descriptors())?;
            parcel.add(transfer::CONTROL, false, &saved)?;
        }
        Ok(())
    }

    /// The other side of [`save`](Self::save).
    ///
    /// # Errors
    /// What was written down makes no sense.
    pub(super) fn restore(parcel: &mut Parcel) -> anyhow::Result<Self> {
        let stats = parcel.take(transfer::STATS)?;
        let stats = stats.map(|saved| RestingStats::restore(saved, parcel.descriptors()));
        let control = parcel.take(transfer::CONTROL)?;
        let control = control.map(|saved| Resting::restore(saved, parcel.descriptors()));
        Ok(Self { stats: stats.transpose()?, control: control.transpose()? })
    }

    /// Lets go of them: another process has them.
    pub(super) fn leave(self) {
        if let Some(stats) = self.stats {
            stats.leave();
        }
        if let Some(control) = self.control {
            control.leave();
        }
    }

    /// Answers whoever comes from here on, and who is there.
    ///
    /// # Errors
    /// The system has no more threads or descriptors; or, where the process before had no control
    /// socket, it can not be had.
    pub(super) fn start(
        self,
        server: &Server,
        config: &ServerConfig,
        powers: &Powers,
    ) -> anyhow::Result<Answering> {
        // The process before may have none. Guests need none.
        let control = match self.control {
            Some(control) => Ok(control),
            None => listen_control(config, powers.keeper_pid),
        };
        let stats = self.stats.map(|stats| StatsSocket::start(stats, server)).transpose()?;
        let control = match control {
            Ok(control) => start_control(control, server, config, powers)?,
            Err(why) => {
                warn!("there is no control socket: {why:#}");
                None
            }
        };
        Ok(Answering { stats, control })
    }
}

fn listen_control(config: &ServerConfig, keeper_pid: Option<u32>) -> anyhow::Result<Resting> {
    let pid = keeper_pid.unwrap_or_else(std::process::id);
    let resting = Resting::listen(&config.control, &config.default_name, pid, config.metrics)?;
    if let Some(address) = resting.metrics() {
        info!("metrics are at http://{address}/metrics, for whoever can reach that");
    }
    Ok(resting)
}

fn start_control(
    resting: Resting,
    server: &Server,
    config: &ServerConfig,
    powers: &Powers,
) -> io::Result<Option<ControlSocket>> {
    let end = Arc::clone(&powers.end);
    let view = View {
        name: resting.name().to_owned(),
        began: resting.began(),
        serves_since: powers.serves_since,
        workers: server.workers(),
        keeper_pid: powers.keeper_pid,
        controllers: Arc::clone(server.registry()),
        changes: Arc::clone(server.changes()),
        settings: Settings::of(config),
        end: Box::new(move || end()),
        upgrade_error: Arc::clone(&powers.upgrade_error),
        asks: powers.asks.clone(),
        tracer: Arc::clone(server.tracer()),
    };
    ControlSocket::start(resting, Arc::new(view))
}

impl Answering {
    /// Ends the threads. What they had.
    pub(super) fn rest(self) -> Asides {
        // `None` of a thread is that it has panicked, which ends the process.
        Asides {
            control: self.control.and_then(ControlSocket::rest),
            stats: self.stats.and_then(StatsSocket::rest),
        }
    }
}
