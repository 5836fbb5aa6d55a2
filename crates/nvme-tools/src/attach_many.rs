//! `attach-many`: attaches many controllers at once, idle or with a light load. Measures how a
//! server's memory and CPU time depend on the number of controllers.

use crate::latency::{Latency, histogram};
use crate::session::Session;
use anyhow::{Context, anyhow, bail};
use serde::Serialize;
use shadowbell_config::target::{self, Target};
use shadowbell_driver::{AttachOptions, Buffer, QueuePair, SpinPolicy};
use shadowbell_process::descriptor_limit;
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time limit of a read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Attach many controllers and keep them attached, optionally under a light load
///
/// Prints one line of JSON when all are attached, and another when the load has ended. Detaches
/// when standard input is closed.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// Controllers to attach
    #[arg(value_name = "TARGET", required = true)]
    targets: Vec<Target>,
    /// Queue pairs per controller
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    queues: u16,
    /// Reads per second and controller, one at a time
    #[arg(long, value_name = "N", requires = "ios", value_parser = clap::value_parser!(u32).range(1..))]
    rate_iops: Option<u32>,
    /// Number of reads in total
    #[arg(long, value_name = "N", requires = "rate_iops")]
    ios: Option<u64>,
}

/// First line of JSON: number of attached controllers, and the time that attaching took.
#[derive(Debug, Serialize)]
struct Attached {
    attached: usize,
    queue_pairs: u32,
    /// Time that one controller took, from connecting to the creation of its last queue pair.
    attach_ns: Latency,
}

/// Second line of JSON: results of the load.
#[derive(Debug, Serialize)]
struct Loaded {
    commands: u64,
    seconds: f64,
    /// Time from a read's due time to its completion.
    latency_ns: Option<Latency>,
}

/// Attached controller with its queues.
struct Attachment {
    session: Session,
    queues: Vec<QueuePair>,
    buffer: Option<Buffer>,
}

/// Runs the verb: attaches, prints a line of JSON, runs the load if requested, prints a second
/// line, and waits for the end of standard input.
///
/// # Errors
/// A controller cannot be attached, or a read fails.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    descriptor_limit::raise();
    let options = AttachOptions {
        queue_pairs: args.queues,
        interrupts: true,
        spin: SpinPolicy::SLEEP,
        ..AttachOptions::default()
    };
    let mut times = histogram()?;
    let mut attachments = Vec::with_capacity(args.targets.len());
    for target in &args.targets {
        let began = Instant::now();
        let mut session = Session::attach(target, &options)?;
        let queues: Vec<_> = std::iter::from_fn(|| session.controller.take_queue_pair()).collect();
        if queues.len() != usize::from(args.queues) {
            bail!("{target} grants {} queue pairs", queues.len());
        }
        times.saturating_record(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        attachments.push(Attachment { session, queues, buffer: None });
    }
    let attached = Attached {
        attached: attachments.len(),
        queue_pairs: attachments.iter().map(|one| one.queues.len() as u32).sum(),
        attach_ns: Latency::of(&times).unwrap_or_default(),
    };
    print(&attached)?;
    if let (Some(rate), Some(ios)) = (args.rate_iops, args.ios) {
        print(&light_load(&mut attachments, rate, ios)?)?;
    }
    // Standard input carries no data; the caller closes it to end the program.
    io::stdin().lock().read_to_end(&mut Vec::new())?;
    for Attachment { session, queues, buffer } in attachments {
        drop((queues, buffer));
        session.detach()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(what: &impl Serialize) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// Reads from the controllers in turn, at equal intervals: `ios` reads in total, and `rate` reads
/// per second of each controller.
fn light_load(attachments: &mut [Attachment], rate: u32, ios: u64) -> anyhow::Result<Loaded> {
    for Attachment { session, buffer, .. } in &mut *attachments {
        let size = session.namespace()?.block_size() as usize;
        *buffer = session.controller.buffers(1, size)?.take();
    }
    let distance = 1.0 / (f64::from(rate) * attachments.len() as f64);
    let mut latencies = histogram()?;
    let began = Instant::now();
    let count = attachments.len() as u64;
    for n in 0..ios {
        let due = began + Duration::from_secs_f64(distance * n as f64);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let index = usize::try_from(n % count.max(1)).unwrap_or(0);
        let Some(attachment) = attachments.get_mut(index) else { bail!("there is no controller") };
        attachment.read()?;
        let latency = u64::try_from(due.elapsed().as_nanos()).unwrap_or(u64::MAX);
        latencies.saturating_record(latency);
    }
    Ok(Loaded {
        commands: ios,
        seconds: began.elapsed().as_secs_f64(),
        latency_ns: Latency::of(&latencies),
    })
}

impl Attachment {
    fn read(&mut self) -> anyhow::Result<()> {
        let command = self.session.namespace()?.read(0, 1)?;
        let queue = self.queues.first_mut().context("there is no queue pair")?;
        let buffer = Some(self.buffer.take().context("there is no buffer")?);
        queue.submit(command, buffer).map_err(|refused| anyhow!(refused.reason))?;
        let deadline = Instant::now() + READ_TIMEOUT;
        let completion = loop {
            if let Some(completion) = queue.pop() {
                break completion;
            }
            if Instant::now() > deadline {
                bail!("{}: a read timed out", self.session.target());
            }
            queue.wait(Some(deadline))?;
        };
        queue.ring_cq_doorbell_if_needed()?;
        if !completion.status.is_success() {
            bail!("{}: a read ended with: {}", self.session.target(), completion.status);
        }
        self.buffer = completion.buffer;
        Ok(())
    }
}
