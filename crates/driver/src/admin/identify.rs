//! Identify. Base 2.1, 5.1.13.

use super::{Admin, AdminData};
use crate::error::CommandError;
use crate::namespace::Namespace;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Identify;
use shadowbell_spec::identify::{
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, NamespaceIds, NamespaceList, cns,
};
use shadowbell_spec::regs::Vs;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// The most namespaces that are looked at: a controller that claims more is not believed.
const MAX_NAMESPACES: usize = 4096;

impl Admin {
    /// Identify, any of its structures: 4096 bytes.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify(&self, nsid: u32, fields: Identify) -> Result<Vec<u8>, CommandError> {
        let sqe = Sqe::identify(nsid, fields, 0);
        Ok(self.succeed(sqe, AdminData::FromController(IDENTIFY_SIZE))?.data)
    }

    fn identify_as<T: FromBytes + KnownLayout + Immutable>(
        &self,
        nsid: u32,
        cns: u8,
    ) -> Result<T, CommandError> {
        let data = self.identify(nsid, Identify { cns, ..Identify::default() })?;
        T::read_from_bytes(&data).map_err(|_| self.nonsense("its data are too short".into()))
    }

    fn nonsense(&self, what: String) -> CommandError {
        CommandError::Nonsense {
            device: self.device_name().to_owned(),
            command: "Identify".into(),
            what,
        }
    }

    /// Identify Controller, CNS 01h.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_controller(&self) -> Result<IdentifyController, CommandError> {
        self.identify_as(0, cns::CONTROLLER)
    }

    /// Identify Namespace, CNS 00h: all zeroes for one that is not active.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace(&self, nsid: u32) -> Result<IdentifyNamespace, CommandError> {
        self.identify_as(nsid, cns::NAMESPACE)
    }

    /// The namespace identification descriptors, CNS 03h (from version 1.3 on).
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn identify_namespace_ids(&self, nsid: u32) -> Result<NamespaceIds, CommandError> {
        self.identify_as(nsid, cns::NAMESPACE_IDS)
    }

    /// The identifiers of the active namespaces, ascending: CNS 02h, as often as it takes.
    ///
    /// # Errors
    /// [`CommandError`], also for a list that is out of order.
    pub fn active_namespaces(&self) -> Result<Vec<u32>, CommandError> {
        let mut all = Vec::new();
        let mut last = 0;
        loop {
            let list: NamespaceList = self.identify_as(last, cns::ACTIVE_NAMESPACES)?;
            let before = all.len();
            for nsid in list.iter() {
                if nsid <= last {
                    return Err(self.nonsense(format!(
                        "the list of active namespaces has {nsid} after {last}"
                    )));
                }
                last = nsid;
                all.push(nsid);
            }
            if all.len() > MAX_NAMESPACES {
                tracing::warn!(
                    "{} has more than {MAX_NAMESPACES} namespaces; the rest is left out",
                    self.device_name()
                );
                all.truncate(MAX_NAMESPACES);
                return Ok(all);
            }
            if all.len() - before < list.nsids.len() {
                return Ok(all);
            }
        }
    }

    /// Everything about the active namespaces.
    pub(crate) fn identify_namespaces(
        &self,
        controller: &IdentifyController,
        max_transfer: u64,
    ) -> Result<Vec<Namespace>, CommandError> {
        let vs = self.shared.device.vs;
        let nsids = match self.active_namespaces() {
            Ok(nsids) => nsids,
            // Before 1.1 there was no such list, and all namespaces up to NN may be active.
            Err(error)
                if error.status().is_some() && vs.into_bits() < Vs::of(1, 1, 0).into_bits() =>
            {
                (1..=controller.nn).take(MAX_NAMESPACES).collect()
            }
            Err(error) => return Err(error),
        };
        let mut namespaces = Vec::with_capacity(nsids.len());
        for nsid in nsids {
            let identity = match self.identify_namespace(nsid) {
                Ok(identity) if identity.nsze == 0 => continue,
                Ok(identity) => identity,
                // Detached in this moment, or of a command set without this structure.
                Err(error) if error.status().is_some() => {
                    tracing::warn!(nsid, "a namespace is left out: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            // Names are nice to have: a controller that has none still works.
            let ids = if vs.into_bits() >= Vs::V1_3.into_bits() {
                match self.identify_namespace_ids(nsid) {
                    Ok(ids) => Some(ids),
                    Err(error) if error.status().is_some() => None,
                    Err(error) => return Err(error),
                }
            } else {
                None
            };
            let namespace = Namespace::new(nsid, controller, identity, ids.as_ref(), max_transfer);
            if let Some(what) = namespace.unusable() {
                tracing::warn!(nsid, "a namespace {what}: it can be looked at but not used");
            }
            namespaces.push(namespace);
        }
        Ok(namespaces)
    }
}
