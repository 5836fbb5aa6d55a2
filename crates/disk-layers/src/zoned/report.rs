//! Report Zones (Zone Management Receive).

use super::zones::ZoneSet;
use shadowbell_disk::{DiskError, ZoneReport, Zones};
use shadowbell_spec::zns::{ZoneDescriptor, ZoneReportHeader};
use zerocopy::IntoBytes;

impl ZoneSet {
    /// Builds a Report Zones data structure of at most [`ZoneReport::len`] bytes.
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`]; [`DiskError::InvalidZone`] if the buffer is too short for the
    /// header, or if an extended report is requested and the zones have no extensions.
    pub(super) fn zone_report(&self, report: &ZoneReport) -> Result<Vec<u8>, DiskError> {
        let extension = self.format().extension_bytes();
        let header = size_of::<ZoneReportHeader>();
        if report.len < header || report.extended && extension == 0 {
            return Err(DiskError::InvalidZone);
        }
        let (first, _) = self.zone_of(report.from)?;
        let each = size_of::<ZoneDescriptor>() + if report.extended { extension } else { 0 };
        let room = (report.len - header) / each;
        let block = u64::from(self.layout().block_size);
        let (size, capacity) = (self.format().size / block, self.format().capacity / block);
        let mut bytes = vec![0; header];
        let mut found = 0u64;
        let state = self.state.lock();
        for (index, zone) in state.zones.iter().enumerate().skip(first) {
            let record = &zone.record;
            if report.which.is_some_and(|which| which != record.state) {
                continue;
            }
            if found >= room as u64 {
                if report.partial {
                    break;
                }
                found += 1;
                continue;
            }
            found += 1;
            let zslba = index as u64 * size;
            let has_pointer = record.state.has_write_pointer();
            let descriptor = ZoneDescriptor {
                zt: ZoneDescriptor::SEQUENTIAL_WRITE_REQUIRED,
                zs: (record.state as u8) << 4,
                za: if record.has_extension { ZoneDescriptor::EXTENSION_VALID } else { 0 },
                zcap: capacity,
                zslba,
                wp: if has_pointer { zslba + record.written } else { u64::MAX },
                ..ZoneDescriptor::default()
            };
            bytes.extend_from_slice(descriptor.as_bytes());
            if report.extended {
                let own = record.has_extension.then(|| self.table.load_extension(index as u64));
                bytes.extend(own.flatten().unwrap_or_else(|| vec![0; extension]));
            }
        }
        drop(state);
        let start = ZoneReportHeader { zones: found, ..ZoneReportHeader::default() };
        bytes.splice(..header, start.as_bytes().iter().copied());
        Ok(bytes)
    }
}
