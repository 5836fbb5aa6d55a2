//! Verbs that change the namespaces of a controller, with the names of nvme-cli.
//!
//! `create-ns`, `delete-ns`, `attach-ns`, `detach-ns`, `format`, `sanitize` and `write-uncor`
//! attach the driver, send the command, and detach. Verbs that destroy data require `--force`.

use crate::session::Session;
use anyhow::{Context, anyhow, bail};
use shadowbell_config::parse;
use shadowbell_config::target::{self, Target};
use shadowbell_driver::{AttachOptions, CommandError};
use shadowbell_process::exit::bad_input;
use shadowbell_spec::admin::{FormatNvm, Identify, Sanitize};
use shadowbell_spec::identify::{IdentifyNamespace, cns};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Time limit of an I/O command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Create a namespace (`attach-ns` makes it usable)
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct CreateArgs {
    /// Controller that creates the namespace
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Size in logical blocks, or in bytes with a unit (1GiB)
    #[arg(short = 's', long, value_name = "SIZE")]
    nsze: String,
    /// Capacity, for compatibility with nvme-cli; must be equal to the size
    #[arg(short = 'c', long, value_name = "SIZE")]
    ncap: Option<String>,
    /// Index of the LBA format
    #[arg(short, long, value_name = "INDEX", value_parser = clap::value_parser!(u8).range(0..64), conflicts_with = "block_size")]
    flbas: Option<u8>,
    /// Logical block size in bytes [default: that of LBA format 0]
    #[arg(short, long, value_name = "BYTES")]
    block_size: Option<u64>,
}

/// Delete a namespace and its data
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct DeleteArgs {
    /// Controller
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Namespace to delete
    #[arg(short, long, value_name = "NSID")]
    namespace_id: u32,
    #[command(flatten)]
    force: Force,
}

/// Options of `attach-ns` and `detach-ns`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct AttachArgs {
    /// Controller that executes the command
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Namespace to attach or detach
    #[arg(short, long, value_name = "NSID")]
    namespace_id: u32,
    /// Identifiers of the controllers [default: that of the target]
    #[arg(short, long, value_name = "CNTLID", value_delimiter = ',')]
    controllers: Vec<u16>,
}

/// Format a namespace: erase it and set its LBA format
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct FormatArgs {
    /// Namespace to format
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Another namespace of this controller; 0xffffffff for all of them
    #[arg(short, long, value_name = "NSID", value_parser = number)]
    namespace_id: Option<u32>,
    /// Index of the LBA format [default: the current one]
    #[arg(short, long, value_name = "INDEX", value_parser = clap::value_parser!(u8).range(0..64), conflicts_with = "block_size")]
    lbaf: Option<u8>,
    /// Logical block size in bytes, instead of an LBA format
    #[arg(short, long, value_name = "BYTES")]
    block_size: Option<u64>,
    /// Secure Erase Settings: 0 for none, 1 for user data erase
    #[arg(short, long, value_name = "0|1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..8))]
    ses: u8,
    /// Protection information type, 1 to 3; 0 for none. Requires an LBA format with metadata
    #[arg(short = 'i', long, value_name = "TYPE", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..4))]
    pi: u8,
    /// Protection information in the first bytes of the metadata instead of the last
    #[arg(short, long)]
    pil: bool,
    /// Metadata at the end of each block (extended LBA) instead of in a separate buffer
    #[arg(short, long)]
    mset: bool,
    #[command(flatten)]
    force: Force,
}

/// Sanitize a controller: erase all of its namespaces
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct SanitizeArgs {
    /// Controller to sanitize
    #[arg(value_name = "TARGET")]
    target: Target,
    /// Sanitize action
    #[arg(short = 'a', long, value_enum, value_name = "ACTION")]
    sanact: Action,
    /// Allow Unrestricted Sanitize Exit: a failure can be left without another operation
    #[arg(short = 'u', long)]
    ause: bool,
    /// Number of overwrite passes, 1 to 16
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    owpass: u8,
    /// Invert the pattern between two passes
    #[arg(short = 'i', long)]
    oipbp: bool,
    /// Do not deallocate the blocks after the operation
    #[arg(short = 'd', long)]
    no_dealloc: bool,
    /// Pattern of an overwrite
    #[arg(short = 'p', long, value_name = "PATTERN", default_value_t = 0, value_parser = number)]
    ovrpat: u32,
    #[command(flatten)]
    force: Force,
}

/// Sanitize Action field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Action {
    /// Exit failure mode
    #[value(alias = "1", alias = "0x01")]
    ExitFailure,
    /// Block erase
    #[value(alias = "2", alias = "0x02", alias = "start-block-erase")]
    BlockErase,
    /// Overwrite
    #[value(alias = "3", alias = "0x03", alias = "start-overwrite")]
    Overwrite,
    /// Crypto erase
    #[value(alias = "4", alias = "0x04", alias = "start-crypto-erase")]
    CryptoErase,
}

/// Mark blocks as unreadable until they are written again
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct UncorrectableArgs {
    /// Namespace
    #[arg(value_name = "TARGET")]
    target: Target,
    /// First block
    #[arg(short, long, value_name = "LBA")]
    start_block: u64,
    /// Number of blocks minus one
    #[arg(short = 'c', long, value_name = "N", default_value_t = 0)]
    block_count: u16,
    #[command(flatten)]
    force: Force,
}

/// Confirmation option of verbs that destroy data.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Force {
    /// Confirm that data is destroyed
    #[arg(long)]
    force: bool,
}

impl Force {
    fn check(self, what: &str) -> anyhow::Result<()> {
        match self.force {
            true => Ok(()),
            false => Err(bad_input(anyhow!("this destroys {what}; confirm with `--force`"))),
        }
    }
}

fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("`{text}` is no number of 32 bits"))
}

/// Refuses a namespace command for a controller without namespace management.
fn check_management(target: &Target, session: &Session) -> anyhow::Result<()> {
    match session.controller.identity().oacs.namespace_management() {
        true => Ok(()),
        false => Err(bad_input(anyhow!(
            "{target}: this controller has no namespace management; serve it with `--pool DIRECTORY`"
        ))),
    }
}

/// Refuses `format` for a controller without that command.
fn check_format(target: &Target, session: &Session) -> anyhow::Result<()> {
    match session.controller.identity().oacs.format_nvm() {
        true => Ok(()),
        false => Err(bad_input(anyhow!(
            "{target}: this controller cannot be formatted; serve it with `--pool DIRECTORY`"
        ))),
    }
}

fn attach_to(target: &Target) -> anyhow::Result<Session> {
    let options = AttachOptions { queue_pairs: 1, queue_depth: 2, ..AttachOptions::default() };
    Session::attach(target, &options)
}

/// Adds the target to an error. An error status of the controller counts as bad input.
fn with_target<T>(target: &Target, outcome: Result<T, CommandError>) -> anyhow::Result<T> {
    outcome.map_err(|error| {
        let is_refused = error.status().is_some();
        let error = anyhow!("{target}: {error}");
        if is_refused { bad_input(error) } else { error }
    })
}

/// Identify data of a namespace, attached or not; for FFFFFFFFh, the capabilities that all
/// namespaces have in common.
fn identify(session: &Session, nsid: u32) -> anyhow::Result<IdentifyNamespace> {
    let cns = if nsid == u32::MAX { cns::NAMESPACE } else { cns::ALLOCATED_NAMESPACE };
    let fields = Identify { cns, ..Identify::default() };
    let page = session.controller.admin().identify(nsid, fields)?;
    IdentifyNamespace::read_from_bytes(&page).map_err(|_| anyhow!("the Identify data is too short"))
}

/// Index of the LBA format with this block size and without metadata.
fn format_of(identity: &IdentifyNamespace, block_size: u64) -> anyhow::Result<u8> {
    let formats = identity.lbaf.iter().take(usize::from(identity.nlbaf) + 1);
    let mut numbered = (0..).zip(formats);
    let found = numbered.find(|(_, f)| f.ms == 0 && f.block_size() == Some(block_size));
    let none = || bad_input(anyhow!("the controller has no LBA format with {block_size} bytes"));
    Ok(found.ok_or_else(none)?.0)
}

/// Runs `create-ns`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn create(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let session = attach_to(&args.target)?;
    check_management(&args.target, &session)?;
    let common = with_target(&args.target, session.controller.admin().identify_namespace(u32::MAX));
    let common = common.context("checking for namespace management")?;
    let format = match (args.flbas, args.block_size) {
        (Some(index), _) => index,
        (None, Some(block_size)) => format_of(&common, block_size)?,
        (None, None) => 0,
    };
    let block_size = common.lbaf.get(usize::from(format)).and_then(|f| f.block_size());
    let block_size = block_size.context("there is no such LBA format").map_err(bad_input)?;
    let blocks = blocks_of(&args.nsze, block_size)?;
    if let Some(ncap) = &args.ncap
        && blocks_of(ncap, block_size)? != blocks
    {
        bail!(bad_input(anyhow!("the capacity must be equal to the size: leave out `--ncap`")));
    }
    let nsid =
        with_target(&args.target, session.controller.admin().create_namespace(blocks, format))?;
    session.detach()?;
    println!("create-ns: Success, created nsid:{nsid}");
    Ok(ExitCode::SUCCESS)
}

/// Parses a number of blocks, or of bytes if it has a unit.
fn blocks_of(text: &str, block_size: u64) -> anyhow::Result<u64> {
    if let Ok(blocks) = text.parse() {
        return Ok(blocks);
    }
    let bytes = parse::size(text).map_err(|why| bad_input(anyhow!(why)))?;
    match bytes.is_multiple_of(block_size) {
        true => Ok(bytes / block_size),
        false => Err(bad_input(anyhow!(
            "{text} is not a multiple of the block size of {block_size} bytes"
        ))),
    }
}

/// Runs `delete-ns`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn delete(args: &DeleteArgs) -> anyhow::Result<ExitCode> {
    let nsid = args.namespace_id;
    args.force.check(&format!("namespace {nsid} of {}", args.target))?;
    let session = attach_to(&args.target)?;
    check_management(&args.target, &session)?;
    with_target(&args.target, session.controller.admin().delete_namespace(nsid))?;
    session.detach()?;
    println!("delete-ns: Success, deleted nsid:{nsid}");
    Ok(ExitCode::SUCCESS)
}

/// Runs `attach-ns` or `detach-ns`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn attach(args: &AttachArgs, attached: bool) -> anyhow::Result<ExitCode> {
    let nsid = args.namespace_id;
    let session = attach_to(&args.target)?;
    check_management(&args.target, &session)?;
    let own = [session.controller.identity().cntlid];
    let cntlids = if args.controllers.is_empty() { &own[..] } else { &args.controllers };
    with_target(
        &args.target,
        session.controller.admin().attach_namespace(nsid, cntlids, attached),
    )?;
    session.detach()?;
    println!("{}-ns: Success, nsid:{nsid}", if attached { "attach" } else { "detach" });
    Ok(ExitCode::SUCCESS)
}

/// Runs `format`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn format(args: &FormatArgs) -> anyhow::Result<ExitCode> {
    let nsid = args.namespace_id.unwrap_or_else(|| args.target.nsid());
    args.force.check(&format!("what namespace {nsid} of {} holds", args.target))?;
    let session = attach_to(&args.target)?;
    check_format(&args.target, &session)?;
    let lbaf = match (args.lbaf, args.block_size) {
        (Some(index), _) => index,
        (None, Some(block_size)) => format_of(&identify(&session, nsid)?, block_size)?,
        (None, None) => identify(&session, nsid)?.flbas.index(),
    };
    let FormatArgs { ses, pi, pil, mset, .. } = *args;
    let fields = FormatNvm { lbaf, ses, pi, pil, mset };
    with_target(&args.target, session.controller.admin().format(nsid, fields))?;
    session.detach()?;
    println!("Success formatting namespace:{nsid:x}");
    Ok(ExitCode::SUCCESS)
}

/// Runs `sanitize`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn sanitize(args: &SanitizeArgs) -> anyhow::Result<ExitCode> {
    let sanact = match args.sanact {
        Action::ExitFailure => Sanitize::EXIT_FAILURE,
        Action::BlockErase => Sanitize::BLOCK_ERASE,
        Action::Overwrite => Sanitize::OVERWRITE,
        Action::CryptoErase => Sanitize::CRYPTO_ERASE,
    };
    if sanact != Sanitize::EXIT_FAILURE {
        args.force.check(&format!("what all namespaces of {} hold", args.target))?;
    }
    let session = attach_to(&args.target)?;
    let fields = Sanitize {
        sanact,
        ause: args.ause,
        owpass: args.owpass & 0xf,
        oipbp: args.oipbp,
        ndas: args.no_dealloc,
        emvs: false,
        ovrpat: args.ovrpat,
    };
    with_target(&args.target, session.controller.admin().sanitize(fields))?;
    session.detach()?;
    println!("sanitize: started; `shadowbell sanitize-log` shows the progress");
    Ok(ExitCode::SUCCESS)
}

/// Runs `write-uncor`.
///
/// # Errors
/// Errors of the driver or the controller.
pub fn write_uncorrectable(args: &UncorrectableArgs) -> anyhow::Result<ExitCode> {
    let blocks = u32::from(args.block_count) + 1;
    args.force.check(&format!("{blocks} blocks of {}", args.target))?;
    let mut session = attach_to(&args.target)?;
    let command = session.namespace()?.write_uncorrectable(args.start_block, blocks);
    let command = command.map_err(|why| bad_input(anyhow!("{}: {why}", args.target)))?;
    let queue = session.controller.take_queue_pair();
    let mut queue = queue.context("the controller grants no queue pair")?;
    queue.submit(command, None).map_err(|error| anyhow!(error.reason))?;
    queue.ring()?;
    let deadline = Instant::now() + COMMAND_TIMEOUT;
    let done = loop {
        if let Some(done) = queue.pop() {
            break done;
        }
        if !queue.wait(Some(deadline))? && Instant::now() >= deadline {
            bail!("{}: the command timed out", args.target);
        }
    };
    if !done.status.is_success() {
        bail!(bad_input(anyhow!("{}: {}", args.target, done.status)));
    }
    queue.ring_cq_doorbell_if_needed()?;
    drop(queue);
    session.detach()?;
    println!("NVME Write Uncorrectable Success");
    Ok(ExitCode::SUCCESS)
}
