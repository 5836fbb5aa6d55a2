//! Failpoints: steps at which a test can kill the process.

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Step after which a process may be killed and the next process must be able to recover.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum AbortPoint {
            $($(#[$doc])* $name,)*
        }

        impl AbortPoint {
            /// All failpoints.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Name of the failpoint in `SHADOWBELL_ABORT_AT`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

points! {
    /// A submission queue entry was read.
    Fetched = "fetched",
    /// The disk has the command, but the journal does not have it yet.
    Started = "started",
    /// The command was recorded in the journal.
    Recorded = "recorded",
    /// Completions are ready to be posted, but none is in the completion queue yet.
    Staged = "staged",
    /// Completions are posted in the completion queue, but their commands are still in the journal.
    Posted = "posted",
    /// The journal records of completed commands were freed.
    Freed = "freed",
    /// The journal has the new submission queue head.
    SqStored = "sq-stored",
    /// The journal has the new completion queue tail.
    CqStored = "cq-stored",
    /// The interrupt was raised, or none was necessary.
    Notified = "notified",
    /// The disk has a command that this process replays after the death of another. The journal
    /// still has the record of the dead process.
    ReplayStarted = "replay-started",
    /// The journal has this process's record of the replayed command.
    ReplayRecorded = "replay-recorded",
    /// An exclusive command has ended, but the journal does not have its outcome yet.
    ExclusiveEnded = "exclusive-ended",
    /// The journal has the outcome of an exclusive command.
    Decided = "decided",
    /// State in the controller's checkpoint has changed (registers, I/O queues or the admin queue),
    /// and the new checkpoint is not stored yet.
    Changed = "changed",
    /// A checkpoint with the changed state was stored, but the host does not see the change yet.
    ChangeRecorded = "change-recorded",
    /// The completion of an admin command is posted.
    AdminPosted = "admin-posted",
    /// The queues of a dead process were recovered.
    QueuesRecovered = "queues-recovered",
    /// A client's message was read, but is still in the socket.
    MessageRead = "message-read",
    /// A client's message was executed.
    MessageHandled = "message-handled",
    /// The effects of a client's message were recorded.
    MessageRecorded = "message-recorded",
    /// A client's message was answered and removed from the socket.
    MessageAnswered = "message-answered",
    /// The memory and the disks of a dead process were restored.
    Rebuilt = "rebuilt",
    /// The supervisor has the complete checkpoint of this process.
    Kept = "kept",
    /// The supervisor was notified that this process has recovered the controllers of the previous
    /// one.
    Taken = "taken",
    /// The next process of an upgrade has checked the checkpoint.
    Checked = "checked",
    /// Everything that this process serves is quiesced for an upgrade.
    Quiesced = "quiesced",
}

/// Deliberately wrong order of steps. A test uses it to prove that it would detect this error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WrongOrder {
    /// Journal records are freed before their completions are posted.
    FreedBeforePosted,
    /// The completion queue tail is stored before journal records are freed.
    StoredBeforeFreed,
    /// Recovery does not wait for the in-flight commands of the dead process.
    NoFence,
}

/// Failpoint: kills this process by SIGKILL if the environment selects `point`.
///
/// `SHADOWBELL_ABORT_AT` is a [name](AbortPoint::name), or `NAME:N` for the Nth time.
/// Alternatively, `SHADOWBELL_ABORT_FILE` is the path of a file that contains `NAME` or `NAME:N`.
/// The first process that reaches a failpoint removes the file, and creates `FILE.died` when it
/// dies. If the file has several lines, a process removes only the first line. The function has no
/// effect without the feature `abort-points`, and in an optimised build.
#[inline]
pub fn abort_point(point: AbortPoint) {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    armed::reached(point);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    let _ = point;
}

/// Directory of `SHADOWBELL_ABORT_FILE`. A process needs access to it, to read the failpoint and to
/// create a file when it dies. `None` without the feature `abort-points`, and in an optimised
/// build.
#[must_use]
pub fn abort_directory() -> Option<std::path::PathBuf> {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    return armed::directory();
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    None
}

/// Step of a command or message at which a process can be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStep {
    /// The command will be executed next.
    Start,
    /// The disk has executed the command. The journal still has it as a command in flight.
    End,
    /// A vfio-user message will be handled next.
    Message,
}

/// Failpoint: ends this process by SIGABRT, like a crash, if a command for a selected block, or a
/// selected vfio-user message, reaches a selected step.
///
/// `SHADOWBELL_ABORT_COMMAND` is `start:LBA`, `end:LBA` or `message:TYPE`, or a list of them
/// separated by commas. The function has no effect without the feature `abort-points`, and in an
/// optimised build.
#[inline]
pub fn abort_command(step: CommandStep, number: u64) {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    armed::command(step, number);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    let _ = (step, number);
}

/// True if `SHADOWBELL_WRONG_ORDER` selects `order`. Always false without the feature
/// `abort-points`, and in an optimised build.
#[inline]
#[must_use]
pub fn is_wrong(order: WrongOrder) -> bool {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    return armed::wrong_order() == Some(order);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    {
        let _ = order;
        false
    }
}

/// Injected fault in an item of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemFault {
    /// The item cannot be decoded.
    Undecodable,
    /// The decoder panics.
    Panic,
}

/// Fault of the item `key` that `SHADOWBELL_ITEM_FAULT` selects: `undecodable:KEY` or `panic:KEY`.
/// `None` without the feature `abort-points`, and in an optimised build.
#[must_use]
pub fn item_fault(key: &str) -> Option<ItemFault> {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    return armed::item_fault(key);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    {
        let _ = key;
        None
    }
}

#[cfg(all(feature = "abort-points", debug_assertions))]
mod armed {
    use super::{AbortPoint, CommandStep, ItemFault, WrongOrder};
    use rustix::process::Signal;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Armed {
        point: AbortPoint,
        left: AtomicU32,
        /// File that is created when the process dies.
        sign: Option<String>,
    }

    fn armed() -> Option<&'static Armed> {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        let read = || {
            let (selected, sign) = selected()?;
            let (name, times) = selected.split_once(':').unwrap_or((&selected, "1"));
            let point = AbortPoint::ALL.iter().find(|point| point.name() == name);
            let point = *point.unwrap_or_else(|| panic!("{selected}: there is no such point"));
            Some(Armed { point, left: AtomicU32::new(times.parse().unwrap_or(1)), sign })
        };
        ARMED.get_or_init(read).as_ref()
    }

    pub(super) fn reached(point: AbortPoint) {
        let Some(armed) = armed().filter(|armed| armed.point == point) else { return };
        if armed.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            if let Some(sign) = &armed.sign {
                let _ = std::fs::write(sign, armed.point.name());
            }
            kill_self(Signal::KILL);
        }
    }

    pub(super) fn directory() -> Option<std::path::PathBuf> {
        let file = std::env::var_os("SHADOWBELL_ABORT_FILE")?;
        Some(std::path::Path::new(&file).parent()?.to_owned())
    }

    /// Reads the selected failpoint, and the name of the file to create when the process dies.
    fn selected() -> Option<(String, Option<String>)> {
        if let Ok(selected) = std::env::var("SHADOWBELL_ABORT_AT") {
            return Some((selected, None));
        }
        let file = std::env::var("SHADOWBELL_ABORT_FILE").ok()?;
        // The rename is atomic, so only one process gets the file.
        let taken = format!("{file}.{}", std::process::id());
        std::fs::rename(&file, &taken).ok()?;
        let selected = std::fs::read_to_string(&taken).ok()?;
        let (mine, others) = selected.split_once('\n').unwrap_or((&selected, ""));
        if !others.is_empty() {
            std::fs::write(&taken, others).ok()?;
            std::fs::rename(&taken, &file).ok()?;
        }
        Some((mine.to_owned(), Some(format!("{file}.died"))))
    }

    /// Kills the process. Parks the thread until the signal takes effect.
    fn kill_self(by: Signal) -> ! {
        let _ = rustix::process::kill_process(rustix::process::getpid(), by);
        loop {
            std::thread::park();
        }
    }

    pub(super) fn command(step: CommandStep, number: u64) {
        static DEADLY: OnceLock<Vec<(CommandStep, u64)>> = OnceLock::new();
        let read = || {
            let selected = std::env::var("SHADOWBELL_ABORT_COMMAND").unwrap_or_default();
            let one = |text: &str| {
                let (step, number) = text.split_once(':')?;
                let step = match step {
                    "start" => CommandStep::Start,
                    "end" => CommandStep::End,
                    "message" => CommandStep::Message,
                    _ => return None,
                };
                Some((step, number.parse().ok()?))
            };
            let each = selected.split(',').filter(|text| !text.is_empty());
            each.map(|text| one(text).unwrap_or_else(|| panic!("{text}: not a command"))).collect()
        };
        if DEADLY.get_or_init(read).contains(&(step, number)) {
            kill_self(Signal::ABORT);
        }
    }

    pub(super) fn item_fault(key: &str) -> Option<ItemFault> {
        static FAULT: OnceLock<Option<(ItemFault, String)>> = OnceLock::new();
        let read = || {
            let text = std::env::var("SHADOWBELL_ITEM_FAULT").ok()?;
            let (fault, key) = text.split_once(':').unwrap_or((&text, ""));
            let fault = match fault {
                "undecodable" => ItemFault::Undecodable,
                "panic" => ItemFault::Panic,
                other => panic!("{other}: there is no such fault"),
            };
            Some((fault, key.to_owned()))
        };
        FAULT.get_or_init(read).as_ref().filter(|(_, its)| its == key).map(|(fault, _)| *fault)
    }

    pub(super) fn wrong_order() -> Option<WrongOrder> {
        static SELECTED: OnceLock<Option<WrongOrder>> = OnceLock::new();
        *SELECTED.get_or_init(|| match std::env::var("SHADOWBELL_WRONG_ORDER").ok()?.as_str() {
            "freed-before-posted" => Some(WrongOrder::FreedBeforePosted),
            "stored-before-freed" => Some(WrongOrder::StoredBeforeFreed),
            "no-fence" => Some(WrongOrder::NoFence),
            other => panic!("{other}: there is no such order"),
        })
    }
}
