//! Client requests for device migration: state, stream, and dirty page log.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::connection::Reply;
use super::{Client, ClientError, MAX_DATA_XFER_SIZE};
use crate::migration::{
    DeviceFeature, DeviceState, LOG_PAGE, LoggingControl, LoggingRange, LoggingReport, MAX_STREAM,
    MigData, MigrationState, feature, feature_flags,
};
use crate::wire::command;

impl Client {
    /// Bits of the migration states that the device supports, such as
    /// [`MIGRATION_STOP_COPY`](crate::migration::MIGRATION_STOP_COPY).
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. A device without migration refuses with
    /// [`Errno::NOTTY`](crate::Errno::NOTTY), and a server without this command with
    /// [`Errno::OPNOTSUPP`](crate::Errno::OPNOTSUPP).
    pub fn migration_flags(&self) -> Result<u64, ClientError> {
        self.feature(feature_flags::GET | feature::MIGRATION, &[], |reply| value(reply))
    }

    /// Migration state of the device.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]; an unknown state is a bad reply.
    pub fn migration_state(&self) -> Result<MigrationState, ClientError> {
        self.feature(feature_flags::GET | feature::MIG_DEVICE_STATE, &[], |reply| {
            let DeviceState { state, .. } = value(reply)?;
            MigrationState::from_wire(state).ok_or_else(|| format!("the state {state} is unknown"))
        })
    }

    /// Changes the migration state, and waits until it is reached.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. After a refusal, the device may be in any state;
    /// [`migration_state`](Self::migration_state) returns it.
    pub fn set_migration_state(&self, state: MigrationState) -> Result<(), ClientError> {
        let data = DeviceState { state: state as u32, data_fd: u32::MAX };
        let index = feature_flags::SET | feature::MIG_DEVICE_STATE;
        self.feature(index, &[data.as_bytes()], |_| Ok(()))
    }

    /// Reads the rest of the migration stream. The device must be in STOP_COPY.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. A stream of more than [`MAX_STREAM`] bytes is a bad reply.
    pub fn read_migration_stream(&self) -> Result<Vec<u8>, ClientError> {
        let (command, size) = (command::MIG_DATA_READ, self.piece());
        let query = MigData { argsz: size.saturating_add(8), size };
        let mut stream = Vec::new();
        loop {
            let mut connection = self.connection.lock();
            let read = connection.request(command, &[query.as_bytes()], &[], |reply| {
                let (head, data) = reply.split::<MigData>()?;
                let is_whole = data.len() == head.size as usize && head.size <= size;
                if !is_whole || stream.len() + data.len() > MAX_STREAM {
                    return Err(format!("{} bytes of the stream", data.len()));
                }
                stream.extend_from_slice(data);
                Ok(data.len())
            })?;
            if read < size as usize {
                return Ok(stream);
            }
        }
    }

    /// Writes the next part of the migration stream. The device must be in RESUMING.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn write_migration_stream(&self, stream: &[u8]) -> Result<(), ClientError> {
        for piece in stream.chunks(self.piece() as usize) {
            let size = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let head = MigData { argsz: size.saturating_add(8), size };
            let payload = [head.as_bytes(), piece];
            let mut connection = self.connection.lock();
            connection.request(command::MIG_DATA_WRITE, &payload, &[], |_| Ok(()))?;
        }
        Ok(())
    }

    /// Starts the log of the pages that the device writes (dirty page log), for `ranges`, or for
    /// all memory if `ranges` is empty. Returns the page size of the log.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn start_dma_logging(&self, ranges: &[LoggingRange]) -> Result<u64, ClientError> {
        let num_ranges = u32::try_from(ranges.len()).unwrap_or(u32::MAX);
        let control = LoggingControl { page_size: LOG_PAGE, num_ranges, reserved: 0 };
        let index = feature_flags::SET | feature::DMA_LOGGING_START;
        self.feature(index, &[control.as_bytes(), ranges.as_bytes()], |reply| {
            let LoggingControl { page_size, .. } = value(reply)?;
            Ok(page_size)
        })
    }

    /// Stops the log of the pages that the device writes.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn stop_dma_logging(&self) -> Result<(), ClientError> {
        self.feature(feature_flags::SET | feature::DMA_LOGGING_STOP, &[], |_| Ok(()))
    }

    /// Reads and clears the dirty page log of a range. Returns the numbers of the pages that were
    /// written since the previous call; pages have `page_size` bytes and are counted from `iova`.
    /// If the bitmap of the range would exceed the server's `max_data_xfer_size`, the caller has to
    /// split the range.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. After an error, the caller must consider all pages written.
    pub fn dirty_pages(
        &self,
        iova: u64,
        length: u64,
        page_size: u64,
    ) -> Result<Vec<u64>, ClientError> {
        let report = LoggingReport { iova, length, page_size };
        let index = feature_flags::GET | feature::DMA_LOGGING_REPORT;
        self.feature(index, &[report.as_bytes()], |reply| {
            let (_, data) = reply.split::<DeviceFeature>()?;
            let (echo, bitmap) =
                LoggingReport::read_from_prefix(data).map_err(|_| "it is too short".to_owned())?;
            let pages = length.div_ceil(page_size.max(1));
            if echo != report || bitmap.len() as u64 != pages.div_ceil(64) * 8 {
                return Err(format!("a bitmap of {} bytes for {pages} pages", bitmap.len()));
            }
            let words = bitmap.chunks_exact(8).filter_map(|word| u64::read_from_bytes(word).ok());
            let set = (0..).zip(words).flat_map(|(n, word): (u64, u64)| {
                (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| n * 64 + bit)
            });
            Ok(set.filter(|page| *page < pages).collect())
        })
    }

    /// Maximum number of bytes of the migration stream per message.
    fn piece(&self) -> u32 {
        let most = self.server.max_data_xfer_size.min(MAX_DATA_XFER_SIZE.into());
        u32::try_from(most.max(1)).unwrap_or(MAX_DATA_XFER_SIZE)
    }

    fn feature<T>(
        &self,
        flags: u32,
        data: &[&[u8]],
        read: impl FnOnce(&mut Reply<'_>) -> Result<T, String>,
    ) -> Result<T, ClientError> {
        let data = data.concat();
        let head = DeviceFeature { argsz: MAX_DATA_XFER_SIZE, flags };
        let payload = [head.as_bytes(), &data];
        self.connection.lock().request(command::DEVICE_FEATURE, &payload, &[], read)
    }
}

/// Data of a DEVICE_FEATURE reply, after its head.
fn value<T: FromBytes + KnownLayout + Immutable>(reply: &Reply<'_>) -> Result<T, String> {
    let (_, data) = reply.split::<DeviceFeature>()?;
    T::read_from_prefix(data).map(|(value, _)| value).map_err(|_| "it is too short".to_owned())
}
