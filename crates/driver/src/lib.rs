//! A user-space NVMe driver with shadow doorbells.
#![forbid(unsafe_code)]
