#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod ana_state;
pub mod config_file;
pub mod controller_config;
pub mod cpu_list;
pub mod disk_layers;
pub mod disk_spec;
pub mod disk_uuids;
pub mod doorbell_mode;
pub mod export_config;
pub mod limits;
pub mod parse;
pub mod pool;
pub mod pool_disks;
pub mod server_config;
pub mod socket_access;
pub mod socket_path;
pub mod subsystems;
pub mod target;
pub mod uuid_text;
