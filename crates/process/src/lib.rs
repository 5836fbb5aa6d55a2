#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod atomic_file;
pub mod deferred_close;
pub mod descriptor_limit;
pub mod error_text;
pub mod exit;
mod log_thread;
pub mod logging;
pub mod notify;
pub mod output;
pub mod process_env;
pub mod shell_quote;
pub mod signals;
pub mod table;
pub mod units;
