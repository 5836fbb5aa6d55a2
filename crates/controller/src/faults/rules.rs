//! Fault types and fault rules, and their parser.

use shadowbell_spec::status::Status;
use std::str::FromStr;
use std::time::Duration;

/// Type of a fault. The [module](super) documents the effect of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Command lost before its execution.
    DropBefore,
    /// Completion lost after the execution.
    DropAfter,
    /// Command that hangs until it is aborted, or for this time, after which it ends with an error.
    Hang(Option<Duration>),
    /// Execution delayed by this time. A write writes the data that are in memory at the time of
    /// execution.
    Stall(Duration),
    /// Completion delayed by this time.
    Delay(Duration),
    /// Completion posted twice.
    Duplicate,
    /// Completion with flipped bits, except in the command identifier.
    Corrupt,
    /// Completion with a command identifier that no command has.
    WrongCid,
    /// Completion with the wrong phase tag, so the host does not see it.
    WrongPhase,
    /// Completion with a submission queue head outside of the queue.
    WrongHead,
    /// Completion with the identifier of another submission queue.
    WrongSqId,
    /// Command that ends with this status and is not executed.
    Status(Status),
    /// Admin commands of this opcode end with Internal Error.
    Refuse(u8),
    /// Admin commands of this opcode are neither executed nor completed.
    Ignore(u8),
    /// CSTS.RDY stays 0 when the controller is enabled.
    NeverReady,
    /// CSTS.RDY stays 1 when the controller is disabled.
    NeverDisabled,
    /// Controller Fatal Status: CSTS.CFS is set.
    Fatal,
    /// NVM Subsystem Reset Occurred: the controller is reset and CSTS.NSSRO is set.
    SubsystemReset,
    /// Surprise removal: all registers read as all ones.
    Removal,
}

/// Frequency of a fault, among the occasions at which it could happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Every nth occasion.
    Every(u64),
    /// Random occasions, one in n on average.
    OneIn(u64),
    /// The nth occasion only, counted from 1.
    At(u64),
}

/// Fault with its frequency and restrictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Type of the fault.
    pub fault: Fault,
    /// Frequency of the fault.
    pub when: When,
    /// I/O queue to which the fault is restricted.
    pub queue: Option<u16>,
    /// Maximum number of injections.
    pub limit: Option<u64>,
}

impl Rule {
    /// Creates a rule for all queues and without a limit.
    #[must_use]
    pub const fn new(fault: Fault, when: When) -> Self {
        Self { fault, when, queue: None, limit: None }
    }
}

/// Fault rules. If several rules apply to a command, it gets the fault of the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of the random choices.
    pub seed: u64,
    /// The rules.
    pub rules: Vec<Rule>,
}

impl Faults {
    /// Creates fault rules with this seed.
    #[must_use]
    pub fn new(seed: u64, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self { seed, rules: rules.into_iter().collect() }
    }
}

/// Syntax error in a text that describes fault rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFaults {
    /// Unknown fault.
    #[error("unknown fault `{0}`; for example: drop-after:every=100,hang:rate=1/50")]
    Fault(String),
    /// Fault with a missing, invalid or superfluous argument.
    #[error("`{0}`: {1}")]
    Argument(String, &'static str),
    /// Unknown or invalid condition.
    #[error("invalid condition `{0}`; known: every=N, rate=1/N, at=N, queue=QID, limit=N")]
    Condition(String),
}

fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Maximum time of a fault. It exceeds all timeouts of hosts, and cannot overflow the clock.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

fn time(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let (count, unit) = text.split_at_checked(split)?;
    let count: u64 = count.parse().ok()?;
    let time = match unit {
        "us" => Duration::from_micros(count),
        "ms" => Duration::from_millis(count),
        "s" => Duration::from_secs(count),
        _ => return None,
    };
    (time <= LONGEST).then_some(time)
}

fn fault(text: &str) -> Result<Fault, BadFaults> {
    let (name, argument) = match text.split_once('=') {
        Some((name, argument)) => (name, Some(argument)),
        None => (text, None),
    };
    let bad = |why| BadFaults::Argument(text.into(), why);
    let opcode = || {
        let opcode = argument.and_then(number).and_then(|n| u8::try_from(n).ok());
        opcode.ok_or_else(|| bad("give an opcode, for example refuse=0x05"))
    };
    let plain = match name {
        "drop-before" => Fault::DropBefore,
        "drop-after" => Fault::DropAfter,
        "duplicate" => Fault::Duplicate,
        "corrupt" => Fault::Corrupt,
        "wrong-cid" => Fault::WrongCid,
        "wrong-phase" => Fault::WrongPhase,
        "wrong-head" => Fault::WrongHead,
        "wrong-sq-id" => Fault::WrongSqId,
        "never-ready" => Fault::NeverReady,
        "never-disabled" => Fault::NeverDisabled,
        "fatal" => Fault::Fatal,
        "subsystem-reset" => Fault::SubsystemReset,
        "removal" => Fault::Removal,
        "refuse" => return opcode().map(Fault::Refuse),
        "ignore" => return opcode().map(Fault::Ignore),
        "hang" => {
            let Some(argument) = argument else { return Ok(Fault::Hang(None)) };
            let time = time(argument).map(|time| Fault::Hang(Some(time)));
            return time.ok_or_else(|| bad("give a time, for example hang=5s, or no argument"));
        }
        "delay" => {
            let time = argument.and_then(time);
            return time
                .map(Fault::Delay)
                .ok_or_else(|| bad("give a time, for example delay=500us"));
        }
        "stall" => {
            let time = argument.and_then(time);
            return time
                .map(Fault::Stall)
                .ok_or_else(|| bad("give a time, for example stall=20ms"));
        }
        "status" => {
            let bits = argument.and_then(number).filter(|bits| (1..0x800).contains(bits));
            let status = bits.map(|bits| Fault::Status(Status::from_bits(bits as u16)));
            return status
                .ok_or_else(|| bad("give a status (SCT and SC), for example status=0x006"));
        }
        _ => return Err(BadFaults::Fault(text.into())),
    };
    if argument.is_some() { Err(bad("this fault takes no argument")) } else { Ok(plain) }
}

fn rule(text: &str) -> Result<Rule, BadFaults> {
    let mut parts = text.split(':').map(str::trim);
    let mut rule = Rule::new(fault(parts.next().unwrap_or_default())?, When::Every(1));
    for part in parts {
        let bad = || BadFaults::Condition(part.into());
        let (name, value) = part.split_once('=').ok_or_else(bad)?;
        let count = |text: &str| number(text).filter(|n| *n != 0).ok_or_else(bad);
        match name {
            "every" => rule.when = When::Every(count(value)?),
            "rate" => {
                let value = value.strip_prefix("1/").ok_or_else(bad)?;
                rule.when = When::OneIn(count(value)?);
            }
            "at" => rule.when = When::At(count(value)?),
            "queue" => rule.queue = Some(u16::try_from(count(value)?).map_err(|_| bad())?),
            "limit" => rule.limit = Some(count(value)?),
            _ => return Err(bad()),
        }
    }
    Ok(rule)
}

impl FromStr for Faults {
    type Err = BadFaults;

    fn from_str(text: &str) -> Result<Self, BadFaults> {
        let mut faults = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match part.strip_prefix("seed=") {
                Some(seed) => {
                    let bad =
                        || BadFaults::Argument(part.into(), "give a number, for example seed=7");
                    faults.seed = number(seed).ok_or_else(bad)?;
                }
                None => faults.rules.push(rule(part)?),
            }
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_and_condition() {
        let text = "drop-before, drop-after:every=100,hang:rate=1/50:queue=2,delay=2ms:at=9,\
                    duplicate,corrupt,wrong-cid,wrong-phase,wrong-head,wrong-sq-id,\
                    status=0x281:limit=3,refuse=5,ignore=0x08,never-ready,never-disabled,fatal,\
                    subsystem-reset,removal:at=1000,seed=0x11,stall=20ms,hang=5s:at=2";
        let faults: Faults = text.parse().unwrap();
        assert_eq!((faults.seed, faults.rules.len()), (17, 20));
        let [first, second, third, fourth, ..] = faults.rules[..] else { panic!() };
        assert_eq!(first, Rule::new(Fault::DropBefore, When::Every(1)));
        assert_eq!(second, Rule::new(Fault::DropAfter, When::Every(100)));
        assert_eq!(third, Rule { queue: Some(2), ..Rule::new(Fault::Hang(None), When::OneIn(50)) });
        assert_eq!(fourth, Rule::new(Fault::Delay(Duration::from_millis(2)), When::At(9)));
        let status = Fault::Status(Status::UNRECOVERED_READ);
        assert_eq!(faults.rules[10], Rule { limit: Some(3), ..Rule::new(status, When::Every(1)) });
        assert_eq!(faults.rules[11].fault, Fault::Refuse(5));
        assert_eq!(faults.rules[12].fault, Fault::Ignore(8));
        let hang = Fault::Hang(Some(Duration::from_secs(5)));
        assert_eq!(faults.rules[19], Rule::new(hang, When::At(2)));
        assert_eq!("".parse(), Ok(Faults::default()));
    }

    #[test]
    fn invalid_fault_rules_are_refused_with_the_reason() {
        for (text, word) in [
            ("drop", "unknown fault"),
            ("hang,:every=1", "unknown fault"),
            ("hang=3", "hang=5s"),
            ("duplicate=3", "no argument"),
            ("delay", "delay=500us"),
            ("delay=5", "delay=500us"),
            ("delay=5min", "delay=500us"),
            ("stall=x", "stall=20ms"),
            ("stall=18446744073709551615s", "stall=20ms"),
            ("refuse=256", "opcode"),
            ("ignore", "opcode"),
            ("status=0", "status=0x006"),
            ("status=0x800", "status=0x006"),
            ("hang:often", "invalid condition"),
            ("hang:every=0", "invalid condition"),
            ("hang:rate=50", "invalid condition"),
            ("hang:queue=70000", "invalid condition"),
            ("seed=x", "seed=7"),
        ] {
            let error = text.parse::<Faults>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
