//! Client side of the control interface: HTTP/1.1 with JSON over a Unix socket.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `api` | types of requests and answers; `docs/openapi.json` is generated from them |
//! | `socket_path` | paths of control sockets |
//! | `client` | HTTP client |
//! | `discovery` | discovery of running servers by name, path or controller socket |
//!
//! The server side is `serve::control`.

pub(crate) mod api;
pub(crate) mod client;
pub(crate) mod discovery;
pub(crate) mod socket_path;
