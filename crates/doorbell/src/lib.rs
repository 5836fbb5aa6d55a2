//! The NVMe shadow doorbell protocol (Doorbell Buffer Config), both ends, model-checked.
#![forbid(unsafe_code)]
