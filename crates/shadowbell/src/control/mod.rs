//! What a running server and those who control it say to each other: HTTP/1.1 with JSON, over a
//! Unix socket.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `api` | what is said, as types; the document (`docs/openapi.json`) is made from them |
//! | `place` | where the sockets are |
//! | `client` | one request to a server, and its answer |
//! | `find` | the server that a person means |
//!
//! The other side is `serve::control`.

pub(crate) mod api;
pub(crate) mod client;
pub(crate) mod find;
pub(crate) mod place;
