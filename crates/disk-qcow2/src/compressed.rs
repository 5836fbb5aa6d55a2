//! Compressed clusters: deflate and zstd.
//!
//! An untrusted image determines how much CPU time decompression takes. So I/O threads never
//! decompress: all images of the process share separate threads, half as many as there are CPUs,
//! with the scheduling class `SCHED_IDLE`.

use crate::sys::be_idle;
use crate::tables::damaged;
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use parking_lot::Mutex;
use ruzstd::decoding::StreamingDecoder;
use shadowbell_disk_file::unpin;
use shadowbell_memory::contain_panic;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};

/// Number of threads if the number of CPUs is unknown.
const FEW: usize = 2;
/// Maximum window size of a zstd frame in bytes. The decoder allocates the window. Compressors
/// usually choose no larger one.
const WINDOW: u64 = 8 << 20;

/// Compressed cluster that a thread has to decompress.
struct Job {
    from: Vec<u8>,
    is_zstd: bool,
    len: usize,
    to: SyncSender<Option<Vec<u8>>>,
}

/// Decompresses a cluster to `len` bytes. `from` may contain further bytes after the compressed
/// data.
pub(crate) fn inflate(from: Vec<u8>, is_zstd: bool, len: usize) -> io::Result<Vec<u8>> {
    static JOBS: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let jobs = JOBS.get_or_init(|| Mutex::new(start()));
    let (to, result) = sync_channel(1);
    let no_thread = || io::Error::from_raw_os_error(libc::EAGAIN);
    jobs.lock().send(Job { from, is_zstd, len, to }).map_err(|_| no_thread())?;
    let result = result.recv().map_err(|_| no_thread())?;
    result.ok_or_else(|| damaged("compressed data that are invalid"))
}

/// Starts the threads.
fn start() -> Sender<Job> {
    let (sender, receiver) = channel();
    let receiver = Arc::new(Mutex::new(receiver));
    let count = std::thread::available_parallelism().map_or(FEW, |n| (n.get() / 2).max(1));
    for _ in 0..count {
        let jobs = Arc::clone(&receiver);
        let thread = std::thread::Builder::new().name("sb-inflate".into());
        // An error is ignored: with fewer threads, requests only wait longer. Without any thread,
        // requests fail.
        let _ = thread.spawn(move || serve(&jobs));
    }
    sender
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    unpin();
    be_idle();
    loop {
        let job = jobs.lock().recv();
        let Ok(Job { from, is_zstd, len, to }) = job else { return };
        let decode = || if is_zstd { unpack_zstd(&from, len) } else { unpack_deflate(&from, len) };
        let _ = to.send(contain_panic(decode).unwrap_or_default());
    }
}

fn unpack_deflate(from: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut into = vec![0; len];
    let mut state = Box::<DecompressorOxide>::default();
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(&mut state, from, &mut into, 0, flags);
    let is_whole = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (is_whole && written == len).then_some(into)
}

fn unpack_zstd(from: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut into = vec![0; len];
    let decoder = StreamingDecoder::new_with_max_window_size(from, WINDOW);
    decoder.ok()?.read_exact(&mut into).ok()?;
    Some(into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_decompressed_or_refused() {
        let content: Vec<u8> = (0..65536_u32).map(|n| (n / 100) as u8).collect();
        let mut packed = miniz_oxide::deflate::compress_to_vec(&content, 6);
        // The compressed data may be followed by the compressed data of another cluster.
        packed.resize(packed.len() + 700, 0xaa);
        assert!(inflate(packed.clone(), false, content.len()).unwrap() == content);
        assert!(inflate(packed.clone(), false, content.len() + 1).is_err(), "too short");
        assert!(inflate(packed.clone(), true, content.len()).is_err(), "not zstd");
        for at in 0..packed.len() - 700 {
            let mut bad = packed.clone();
            bad[at] ^= 0x55;
            let _ = inflate(bad, false, content.len());
        }
    }

    /// The threads have half of the CPUs, and run only when a CPU is otherwise idle.
    #[test]
    fn decompression_is_limited_and_idle() {
        inflate(miniz_oxide::deflate::compress_to_vec(&[1; 512], 6), false, 512).unwrap();
        let mut policies = Vec::new();
        for thread in std::fs::read_dir("/proc/self/task").unwrap() {
            let read =
                |name: &str| std::fs::read_to_string(thread.as_ref().unwrap().path().join(name));
            // A thread of another test may end meanwhile.
            let (Ok(name), Ok(stat)) = (read("comm"), read("stat")) else { continue };
            if name.trim() == "sb-inflate" {
                let fields = stat.rsplit_once(')').unwrap().1;
                policies.push(fields.split_whitespace().nth(38).unwrap().parse::<i32>().unwrap());
            }
        }
        let cpus = std::thread::available_parallelism().unwrap().get();
        assert!((1..=(cpus / 2).max(1)).contains(&policies.len()), "{policies:?}, {cpus} CPUs");
        // A thread sets its scheduling class before it executes a job.
        assert!(policies.contains(&libc::SCHED_IDLE), "{policies:?}");
    }

    /// A frame of zstd states how much memory its decoder needs.
    #[test]
    fn a_zstd_frame_cannot_demand_much_memory() {
        use ruzstd::encoding::{CompressionLevel, compress_to_vec};
        let content: Vec<u8> = (0..65536_u32).map(|n| (n / 100) as u8).collect();
        let packed = compress_to_vec(&content[..], CompressionLevel::Fastest);
        assert!(inflate(packed, true, content.len()).unwrap() == content);
        // Magic number, no content size, window of 2^(10 + exponent), and a block of equal bytes.
        let frame = |exponent: u8, len: u32| {
            let block = ((len << 3) | 1 << 1 | 1).to_le_bytes();
            [&[0x28, 0xb5, 0x2f, 0xfd, 0, exponent << 3], &block[..3], &[7]].concat()
        };
        assert_eq!(inflate(frame(13, 512), true, 512).unwrap(), [7; 512]);
        assert!(inflate(frame(14, 512), true, 512).is_err());
    }
}
