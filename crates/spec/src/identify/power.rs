//! Power state descriptors. Base 2.1, 5.1.13.2.1, "Power State Descriptor Data Structure".

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Flags of a power state: byte 3 of the descriptor.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PowerFlags {
    /// Max Power Scale: [`PowerState::mp`] is in units of 0.0001 W instead of 0.01 W.
    pub mxps: bool,
    /// Non-Operational State: the controller processes no I/O commands in this power state.
    pub nops: bool,
    #[bits(6)]
    __: u8,
}

/// Power state descriptor: 32 bytes.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct PowerState {
    /// Maximum Power, in the unit of [`PowerFlags::mxps`].
    pub mp: u16,
    /// Reserved.
    pub reserved2: u8,
    /// Max Power Scale and Non-Operational State.
    pub flags: PowerFlags,
    /// Entry Latency in microseconds.
    pub enlat: u32,
    /// Exit Latency in microseconds.
    pub exlat: u32,
    /// Relative Read Throughput, 5 bits; 0 is best.
    pub rrt: u8,
    /// Relative Read Latency, 5 bits; 0 is best.
    pub rrl: u8,
    /// Relative Write Throughput, 5 bits; 0 is best.
    pub rwt: u8,
    /// Relative Write Latency, 5 bits; 0 is best.
    pub rwl: u8,
    /// Idle Power, in the unit of `ips`.
    pub idlp: u16,
    /// Idle Power Scale in bits 7:6: 0 not reported, 1 0.0001 W, 2 0.01 W.
    pub ips: u8,
    /// Reserved.
    pub reserved19: u8,
    /// Active Power, in the unit of `apws`.
    pub actp: u16,
    /// Active Power Workload in bits 2:0, Active Power Scale in bits 7:6.
    pub apws: u8,
    /// Emergency Power Fail Recovery Time.
    pub epfrt: u8,
    /// Forced Quiescence Vault Time.
    pub fqvt: u8,
    /// Emergency Power Fail Vault Time.
    pub epfvt: u8,
    /// Time scales of `fqvt` in bits 7:4, and of `epfrt` in bits 3:0.
    pub epfr_fqv_ts: u8,
    /// Emergency Power Fail Vault Time Scale in bits 3:0.
    pub epfvts: u8,
    /// Reserved.
    pub reserved28: [u8; 4],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(PowerState, 32, {
            mp: 0, reserved2: 2, flags: 3, enlat: 4, exlat: 8, rrt: 12, rrl: 13, rwt: 14, rwl: 15,
            idlp: 16, ips: 18, reserved19: 19, actp: 20, apws: 22, epfrt: 23, fqvt: 24, epfvt: 25,
            epfr_fqv_ts: 26, epfvts: 27, reserved28: 28,
        });
        assert_eq!(PowerFlags::new().with_mxps(true).into_bits(), 1);
        assert_eq!(PowerFlags::new().with_nops(true).into_bits(), 2);
    }
}
