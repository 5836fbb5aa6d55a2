//! The vfio-user protocol: a sans-I/O codec, a server and a client.
#![forbid(unsafe_code)]
