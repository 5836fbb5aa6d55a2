//! Published measurements of other systems with shadow doorbells. Machines and years differ, so
//! only the factor between the two columns is comparable.

/// Pair of published figures: without shadow doorbells, and with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Published {
    /// Name of the table.
    pub(super) table: &'static str,
    /// I/Os in flight.
    pub(super) iodepth: u32,
    /// I/Os per second.
    pub(super) iops: [f64; 2],
    /// MMIO writes per I/O, if published.
    pub(super) mmio_per_io: Option<[f64; 2]>,
}

const fn published(
    table: &'static str,
    iodepth: u32,
    iops: [f64; 2],
    mmio_per_io: Option<[f64; 2]>,
) -> Published {
    Published { table, iodepth, iops, mmio_per_io }
}

/// All published figures.
pub(super) const PUBLISHED: [Published; 6] = [
    published("S0", 32, [43_900.0, 184_000.0], None),
    published("S1", 32, [200_000.0, 1_000_000.0], None),
    published("S3", 1, [25_100.0, 29_100.0], Some([2.01, 1.00])),
    published("S3", 2, [25_900.0, 60_100.0], Some([1.99, 0.52])),
    published("S3", 4, [24_500.0, 99_800.0], Some([1.99, 0.27])),
    published("S3", 8, [24_000.0, 82_500.0], Some([1.99, 0.46])),
];

/// Title of a table, and source of its published figures.
pub(super) fn title(table: &str) -> (&'static str, &'static str) {
    match table {
        "S0" => (
            "4 KiB random reads from memory, 32 in flight",
            "Doorbell Buffer Config on a hypervisor, Linux 4.12 guest",
        ),
        "S1" => (
            "4 KiB random reads, null disk, 4 jobs with 32 in flight each",
            "Linux host driver, null backing device",
        ),
        _ => (
            "4 KiB random reads from memory, few in flight",
            "emulated controller of QEMU (hw/nvme)",
        ),
    }
}

/// Published figures for a row of a table.
pub(super) fn figures_for(table: &str, iodepth: u32) -> Option<&'static Published> {
    PUBLISHED.iter().find(|figures| figures.table == table && figures.iodepth == iodepth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_has_published_figures() {
        for (table, depths) in [("S0", &[32][..]), ("S1", &[32]), ("S3", &[1, 2, 4, 8])] {
            for depth in depths {
                assert!(figures_for(table, *depth).is_some(), "{table} {depth}");
            }
        }
        assert!(figures_for("S0", 1).is_none());
    }
}
