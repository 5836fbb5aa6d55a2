//! The test machine: builds and boots a Linux guest under QEMU.
#![forbid(unsafe_code)]
