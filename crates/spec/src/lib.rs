//! NVMe on the wire: registers, commands, completions, Identify data, log pages, status codes.
#![forbid(unsafe_code)]
