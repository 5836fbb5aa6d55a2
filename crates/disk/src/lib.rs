//! What an NVMe namespace keeps its bytes in: null, memory, file (io_uring).
#![forbid(unsafe_code)]
