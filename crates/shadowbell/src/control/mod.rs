//! Client side of the control interface: HTTP/1.1 with JSON over a Unix socket.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `api` | types of requests and answers; `docs/openapi.json` is generated from them |
//! | `place` | paths of control sockets |
//! | `client` | HTTP client |
//! | `find` | discovery of running servers by name, path or controller socket |
//!
//! The server side is `serve::control`.

pub(crate) mod api;
pub(crate) mod client;
pub(crate) mod find;
pub(crate) mod place;
