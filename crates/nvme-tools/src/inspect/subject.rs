//! Access to the controller that a verb queries: through the driver, or through the control socket
//! of the controller's server while another client is connected.

use crate::session::Session;
use anyhow::{Context, anyhow};
use shadowbell_config::target::Target;
use shadowbell_control_api::api::Controller as Described;
use shadowbell_control_api::client::{Client, part};
use shadowbell_control_api::discovery;
use shadowbell_driver::{AttachOptions, CommandError};
use shadowbell_spec::Status;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, cns};
use shadowbell_spec::log::{AnaLog, ErrorLogEntry, SanitizeLog, SelfTestLog, SmartHealth, lid};
use zerocopy::FromBytes;

pub(super) enum Subject {
    /// Controller that the driver of this process has attached.
    Attached(Box<Session>),
    /// Controller in use by another client: its server executes the admin commands out of band.
    Served { client: Client, controller: Box<Described> },
}

impl Subject {
    /// Opens the controller that `target` names.
    ///
    /// # Errors
    /// The controller cannot be attached.
    pub(super) fn open(target: &Target) -> anyhow::Result<Self> {
        if let Target::VfioUser { socket, .. } = target
            && let Some((client, controller)) = discovery::owner(socket)
            && controller.client
        {
            return Ok(Self::Served { client, controller: Box::new(controller) });
        }
        attach(target).map(|session| Self::Attached(Box::new(session)))
    }

    pub(super) fn identify_controller(&self) -> anyhow::Result<IdentifyController> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().identify_controller()?),
            Self::Served { .. } => {
                self.request_structure(&format!("identify/{}/0", cns::CONTROLLER))
            }
        }
    }

    /// CAP.MPSMIN: the smallest memory page size is 2^(12 + MPSMIN) bytes.
    pub(super) fn mpsmin(&self) -> u8 {
        match self {
            Self::Attached(session) => session.controller.capabilities().mpsmin(),
            // Every controller that Shadowbell emulates has this CAP.MPSMIN.
            Self::Served { .. } => 0,
        }
    }

    /// Identify data of all active namespaces, with their NSIDs.
    pub(super) fn namespaces(&self) -> anyhow::Result<Vec<(u32, IdentifyNamespace)>> {
        match self {
            Self::Attached(session) => {
                let namespaces = session.controller.namespaces().iter();
                Ok(namespaces.map(|ns| (ns.nsid(), *ns.identity())).collect())
            }
            Self::Served { controller, .. } => {
                let nsids = controller.namespaces.iter().map(|namespace| namespace.nsid);
                nsids.map(|nsid| Ok((nsid, self.identified(nsid)?))).collect()
            }
        }
    }

    /// Identify data of a namespace. `None` if there is no namespace `nsid`.
    pub(super) fn identify_namespace(
        &self,
        nsid: u32,
    ) -> anyhow::Result<Option<IdentifyNamespace>> {
        let is_missing = |error: &CommandError| {
            error.status().map(Status::code) == Some(Status::INVALID_NAMESPACE_OR_FORMAT)
        };
        match self {
            Self::Attached(session) => match session.controller.admin().identify_namespace(nsid) {
                Ok(identity) => Ok(Some(identity)),
                Err(error) if is_missing(&error) => Ok(None),
                Err(error) => Err(error.into()),
            },
            Self::Served { controller, .. } => {
                let is_there = controller.namespaces.iter().any(|ns| ns.nsid == nsid);
                is_there.then(|| self.identified(nsid)).transpose()
            }
        }
    }

    fn identified(&self, nsid: u32) -> anyhow::Result<IdentifyNamespace> {
        self.request_structure(&format!("identify/{}/{nsid}", cns::NAMESPACE))
    }

    /// UUID of a namespace, if it has one.
    pub(super) fn uuid(&self, nsid: u32) -> Option<[u8; 16]> {
        match self {
            Self::Attached(session) => session.controller.namespace(nsid)?.uuid(),
            Self::Served { controller, .. } => {
                let namespace = controller.namespaces.iter().find(|ns| ns.nsid == nsid)?;
                let digits = namespace.uuid.replace('-', "");
                u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
            }
        }
    }

    pub(super) fn smart_log(&self) -> anyhow::Result<SmartHealth> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().smart_log()?),
            Self::Served { .. } => {
                self.request_structure(&format!("log-page/{}", lid::SMART_HEALTH))
            }
        }
    }

    pub(super) fn self_test_log(&self) -> anyhow::Result<SelfTestLog> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().self_test_log()?),
            Self::Served { .. } => self.request_structure(&format!("log-page/{}", lid::SELF_TEST)),
        }
    }

    pub(super) fn sanitize_log(&self) -> anyhow::Result<SanitizeLog> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().sanitize_log()?),
            Self::Served { .. } => {
                self.request_structure(&format!("log-page/{}", lid::SANITIZE_STATUS))
            }
        }
    }

    /// ANA log page. `None` if the controller does not report ANA states.
    pub(super) fn ana_log(&self) -> anyhow::Result<Option<AnaLog>> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().ana_log()?),
            Self::Served { controller, .. } if controller.ana.is_empty() => Ok(None),
            Self::Served { .. } => {
                let page = self.bytes(&format!("log-page/{}", lid::ANA))?;
                let log = AnaLog::decode(&page).context("the server's answer is too short")?;
                Ok(Some(log))
            }
        }
    }

    /// Newest `count` entries of the error log.
    pub(super) fn error_log(&self, count: u16) -> anyhow::Result<Vec<ErrorLogEntry>> {
        match self {
            Self::Attached(session) => Ok(session.controller.admin().error_log(count)?),
            Self::Served { .. } => {
                let page = self.bytes(&format!("log-page/{}", lid::ERROR_INFORMATION))?;
                let entries = page.chunks_exact(size_of::<ErrorLogEntry>());
                let entries = entries.filter_map(|e| ErrorLogEntry::read_from_bytes(e).ok());
                let entries = entries.take_while(|entry| entry.error_count != 0);
                Ok(entries.take(count.into()).collect())
            }
        }
    }

    /// Detaches the controller if it was attached.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        match self {
            Self::Attached(session) => session.detach(),
            Self::Served { .. } => Ok(()),
        }
    }

    /// Requests a data structure from the server.
    fn request_structure<T: FromBytes>(&self, what: &str) -> anyhow::Result<T> {
        let bytes = self.bytes(what)?;
        let bytes = bytes.get(..size_of::<T>()).and_then(|bytes| T::read_from_bytes(bytes).ok());
        bytes.with_context(|| format!("the server's answer to {what} is too short"))
    }

    fn bytes(&self, what: &str) -> anyhow::Result<Vec<u8>> {
        match self {
            Self::Attached(_) => Err(anyhow!("the controller is attached")),
            Self::Served { client, controller } => {
                client.bytes(&format!("/v1/controllers/{}/{what}", part(&controller.id)))
            }
        }
    }
}

/// Attaches a controller for admin commands only.
pub(super) fn attach(target: &Target) -> anyhow::Result<Session> {
    // The driver creates at least one I/O queue. It stays unused, so the smallest depth suffices.
    let options = AttachOptions { queue_depth: 2, interrupts: false, ..AttachOptions::default() };
    Session::attach(target, &options)
}
