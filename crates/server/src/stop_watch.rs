//! Log messages about disks that are stopped by an error of their storage.

use super::disks::ListedDisk;
use std::collections::BTreeMap;
use std::time::Instant;
use tracing::{info, warn};

/// Stopped disk, as the log reports it.
struct Reported {
    /// Number of times that the disk was stopped, as of the last log line about it.
    times: u64,
    /// Number of resumes of the disk when it was stopped.
    resumes: u64,
    since: Instant,
}

/// Stopped disks that are in the log.
#[derive(Default)]
pub(super) struct StopWatch(BTreeMap<String, Reported>);

impl StopWatch {
    /// Logs each disk that was stopped since the last call, or whose stop has ended.
    pub(super) fn report(&mut self, disks: &[ListedDisk]) {
        for ListedDisk { id, open, .. } in disks {
            let source = open.disk.name();
            match (open.disk.stopped(), self.0.get(id)) {
                (Some(stopped), reported)
                    if reported.is_none_or(|reported| reported.times != stopped.times) =>
                {
                    let held = match stopped.held {
                        1 => "1 request is".to_owned(),
                        count => format!("{count} requests are"),
                    };
                    warn!(
                        "the disk {id} ({source}) is stopped: {}; {held} held; repair the storage \
                         or make room, then run `shadowbell ctl disk resume {id}`",
                        stopped.reason
                    );
                    let (times, resumes) = (stopped.times, open.disk.resumes());
                    let since = Instant::now();
                    self.0.insert(id.clone(), Reported { times, resumes, since });
                }
                (None, Some(reported)) => {
                    let seconds = reported.since.elapsed().as_secs();
                    if open.disk.resumes() != reported.resumes {
                        info!("the disk {id} ({source}) is resumed, after {seconds} s");
                    } else {
                        info!(
                            "the disk {id} ({source}) holds no request any more, after {seconds} \
                             s; it was not resumed"
                        );
                    }
                    self.0.remove(id);
                }
                _ => {}
            }
        }
        self.0.retain(|id, _| disks.iter().any(|disk| disk.id == *id));
    }
}
