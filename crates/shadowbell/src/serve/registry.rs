//! The controllers that are served, for all who look at them.

use super::server_config::SocketConfig;
use crate::keeper_link::known_path;
use parking_lot::RwLock;
use shadowbell_backend::Disk;
use shadowbell_controller::Controller;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A controller that is served.
pub(super) struct ServedController {
    /// Its socket, as it was written.
    pub(super) name: String,
    /// What requests call it.
    pub(super) id: String,
    /// Its socket, from the root.
    pub(super) socket: String,
    pub(super) controller: Controller,
    /// Whether a client is connected.
    pub(super) client: Arc<AtomicBool>,
}

impl ServedController {
    pub(super) fn new(
        asked: &SocketConfig,
        controller: Controller,
        client: Arc<AtomicBool>,
    ) -> Self {
        let socket = known_path(&asked.absolute_socket()).to_string_lossy().into_owned();
        Self {
            name: asked.socket.display().to_string(),
            id: socket.clone(),
            socket,
            controller,
            client,
        }
    }

    /// Its disks, in the order of their namespaces.
    pub(super) fn disks(&self) -> impl Iterator<Item = Arc<dyn Disk>> {
        self.controller.namespaces().into_iter().map(|(_, namespace)| namespace.disk)
    }

    pub(super) fn has_client(&self) -> bool {
        self.client.load(Ordering::Relaxed)
    }
}

/// All of them, in the order of the configuration.
#[derive(Default)]
pub(super) struct Registry(RwLock<Vec<Arc<ServedController>>>);

impl Registry {
    pub(super) fn new(controllers: Vec<ServedController>) -> Self {
        Self(RwLock::new(controllers.into_iter().map(Arc::new).collect()))
    }

    /// As of now.
    pub(super) fn all(&self) -> Vec<Arc<ServedController>> {
        self.0.read().clone()
    }
}
