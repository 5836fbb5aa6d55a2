//! Moments in which a process of a test ends, as if it had been killed there.

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A step after which a process may be killed, and another one has to go on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum AbortPoint {
            $($(#[$doc])* $name,)*
        }

        impl AbortPoint {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// What `SHADOWBELL_ABORT_AT` calls it.
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
    /// A disk has the command, and nothing says so.
    Started = "started",
    /// The command was recorded.
    Recorded = "recorded",
    /// Completions are there, and none is posted.
    Staged = "staged",
    /// Completions are posted.
    Posted = "posted",
    /// The records of what was completed are freed.
    Freed = "freed",
    /// How far the submission queue was fetched is stored.
    SqStored = "sq-stored",
    /// Where the next completion goes is stored.
    CqStored = "cq-stored",
    /// The host was interrupted, or need not be.
    Notified = "notified",
    /// A disk has a command of a process before, and the record is that of before.
    ReplayStarted = "replay-started",
    /// It was recorded once more.
    ReplayRecorded = "replay-recorded",
    /// A command that is alone has ended, and nothing says so.
    AloneEnded = "alone-ended",
    /// What was decided of a command that is alone is written down.
    Decided = "decided",
    /// Registers, queues or the admin queue have changed.
    Changed = "changed",
    /// That was recorded, and the host does not see it yet.
    ChangeRecorded = "change-recorded",
    /// The completion of an admin command is posted.
    AdminPosted = "admin-posted",
    /// The queues of a process before are there again.
    QueuesRecovered = "queues-recovered",
    /// A client's message was looked at.
    MessageRead = "message-read",
    /// It was carried out.
    MessageHandled = "message-handled",
    /// What it has brought about was recorded.
    MessageRecorded = "message-recorded",
    /// It was answered and taken out of the socket.
    MessageAnswered = "message-answered",
    /// The memory and the disks of a process before are there.
    Rebuilt = "rebuilt",
    /// The supervisor has everything of this process.
    Kept = "kept",
    /// The supervisor was told so.
    Taken = "taken",
    /// All that is served is at rest, to be handed over.
    AtRest = "at-rest",
    /// The state was sent to the process that is to go on.
    StateSent = "state-sent",
    /// It was told to go on.
    Committed = "committed",
    /// It has taken the state in.
    TakenIn = "taken-in",
    /// A vhost-user device has taken a request from the available ring.
    RequestTaken = "request-taken",
    /// Its number is stored.
    RequestNumbered = "request-numbered",
    /// It is marked as being in flight.
    RequestMarked = "request-marked",
    /// A disk has ended a request, and the guest has its data and status.
    RequestEnded = "request-ended",
    /// It is in the list of those that were answered last.
    RequestListed = "request-listed",
    /// The used ring has it.
    RequestUsed = "request-used",
    /// It is not marked any more.
    RequestFreed = "request-freed",
    /// The index of the used ring is stored.
    RequestAnswered = "request-answered",
    /// Controllers go one by one, and the supervisor was told that there is no way back.
    Moving = "moving",
    /// One of them was let go of.
    LetGo = "let-go",
    /// One of them is at rest in the process that is to go on, and the supervisor knows that both
    /// count.
    TakenOne = "taken-one",
}

/// A wrong order of steps, to see that a test finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WrongOrder {
    /// Records (or marks) are freed before their completions are posted.
    FreedBeforePosted,
    /// Where the next completion goes is stored before records (or marks) are freed.
    StoredBeforeFreed,
    /// What a dead process has under way is not waited for.
    NoFence,
}

/// Ends this process here, if `SHADOWBELL_ABORT_AT` says so: a [name](AbortPoint::name), or
/// `NAME:N` for the Nth time. Or if that is in the file that `SHADOWBELL_ABORT_FILE` names: the
/// first process that comes to a point takes the file away, and leaves `FILE.died` when it dies. If
/// the file has several lines, a process takes the first and leaves the others. A process ends by
/// SIGKILL. Without the feature `abort-points`, and in an optimised build, it does nothing.
#[inline]
pub fn abort_point(point: AbortPoint) {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    armed::reached(point);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    let _ = point;
}

/// Where a process looks for the point at which it is to end, and leaves a sign that it has: the
/// directory of `SHADOWBELL_ABORT_FILE`. None without the feature `abort-points`, nor in an
/// optimised build.
#[must_use]
pub fn abort_directory() -> Option<std::path::PathBuf> {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    return armed::directory();
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    None
}

/// A step of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStep {
    /// It is about to be carried out.
    Start,
    /// A disk has carried it out, and nothing says so.
    End,
}

/// Ends this process by SIGABRT, as a fault would, whenever the command for a certain block comes
/// to a certain step: `SHADOWBELL_ABORT_COMMAND` is `start:LBA` or `end:LBA`, or several of them
/// with commas. Without the feature `abort-points`, and in an optimised build, it does nothing.
#[inline]
pub fn abort_command(step: CommandStep, lba: u64) {
    #[cfg(all(feature = "abort-points", debug_assertions))]
    armed::command(step, lba);
    #[cfg(not(all(feature = "abort-points", debug_assertions)))]
    let _ = (step, lba);
}

/// Whether `SHADOWBELL_WRONG_ORDER` asks for this one. Never without the feature `abort-points`,
/// nor in an optimised build.
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

/// Whether this process is to do as a release before it did, where both know a better way and say
/// so: `SHADOWBELL_AS_BEFORE` is there. Never without the feature `abort-points`, nor in an
/// optimised build.
#[must_use]
pub fn is_as_before() -> bool {
    cfg!(all(feature = "abort-points", debug_assertions))
        && std::env::var_os("SHADOWBELL_AS_BEFORE").is_some()
}

#[cfg(all(feature = "abort-points", debug_assertions))]
mod armed {
    use super::{AbortPoint, CommandStep, WrongOrder};
    use rustix::process::Signal;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Armed {
        point: AbortPoint,
        left: AtomicU32,
        /// Is to be there when it has died.
        sign: Option<String>,
    }

    fn armed() -> Option<&'static Armed> {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        let read = || {
            let (asked, sign) = asked()?;
            let (name, times) = asked.split_once(':').unwrap_or((&asked, "1"));
            let point = AbortPoint::ALL.iter().find(|point| point.name() == name);
            let point = *point.unwrap_or_else(|| panic!("{asked}: there is no such point"));
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
            die(Signal::KILL);
        }
    }

    pub(super) fn directory() -> Option<std::path::PathBuf> {
        let file = std::env::var_os("SHADOWBELL_ABORT_FILE")?;
        Some(std::path::Path::new(&file).parent()?.to_owned())
    }

    /// What is asked for, and the file that is to be there in the end.
    fn asked() -> Option<(String, Option<String>)> {
        if let Ok(asked) = std::env::var("SHADOWBELL_ABORT_AT") {
            return Some((asked, None));
        }
        let file = std::env::var("SHADOWBELL_ABORT_FILE").ok()?;
        // Who renames it has it.
        let taken = format!("{file}.{}", std::process::id());
        std::fs::rename(&file, &taken).ok()?;
        let asked = std::fs::read_to_string(&taken).ok()?;
        let (mine, others) = asked.split_once('\n').unwrap_or((&asked, ""));
        if !others.is_empty() {
            std::fs::write(&taken, others).ok()?;
            std::fs::rename(&taken, &file).ok()?;
        }
        Some((mine.to_owned(), Some(format!("{file}.died"))))
    }

    /// Nothing of this process goes on.
    fn die(by: Signal) -> ! {
        let _ = rustix::process::kill_process(rustix::process::getpid(), by);
        loop {
            std::thread::park();
        }
    }

    pub(super) fn command(step: CommandStep, lba: u64) {
        static DEADLY: OnceLock<Vec<(CommandStep, u64)>> = OnceLock::new();
        let read = || {
            let asked = std::env::var("SHADOWBELL_ABORT_COMMAND").unwrap_or_default();
            let one = |text: &str| {
                let (step, lba) = text.split_once(':')?;
                let step = match step {
                    "start" => CommandStep::Start,
                    "end" => CommandStep::End,
                    _ => return None,
                };
                Some((step, lba.parse().ok()?))
            };
            let each = asked.split(',').filter(|text| !text.is_empty());
            each.map(|text| one(text).unwrap_or_else(|| panic!("{text}: not a command"))).collect()
        };
        if DEADLY.get_or_init(read).contains(&(step, lba)) {
            die(Signal::ABORT);
        }
    }

    pub(super) fn wrong_order() -> Option<WrongOrder> {
        static WRONG: OnceLock<Option<WrongOrder>> = OnceLock::new();
        *WRONG.get_or_init(|| match std::env::var("SHADOWBELL_WRONG_ORDER").ok()?.as_str() {
            "freed-before-posted" => Some(WrongOrder::FreedBeforePosted),
            "stored-before-freed" => Some(WrongOrder::StoredBeforeFreed),
            "no-fence" => Some(WrongOrder::NoFence),
            other => panic!("{other}: there is no such order"),
        })
    }
}
