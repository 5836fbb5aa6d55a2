//! Sanitize: nothing is left of what any namespace of the pool has held. Base 2.1, 5.1.22,
//! 5.1.12.1.33 and 8.1.24.

use crate::pool::{PoolAct, PoolState, SanitizePhase, SanitizeStatus};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Sanitize;
use shadowbell_spec::identify::Sanicap;
use shadowbell_spec::log::{SanitizeLog, SanitizeState, sos};
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::status::Status;

/// What is supported. Blocks are deallocated in any case, and a command that does not want that is
/// refused: without the Sanitize Config feature, No-Deallocate Response Mode is 0.
pub(crate) fn capabilities() -> Sanicap {
    Sanicap::new().with_bes(true).with_ows(true).with_ndi(true).with_nodmmas(1)
}

/// Sanitize. `given`: the controller has namespaces that are not of the pool, which would have to
/// be sanitized as well, and are not the host's to erase.
///
/// # Errors
/// The status that the command completes with.
pub(crate) fn sanitize(sqe: &Sqe, state: &PoolState, given: bool) -> Result<PoolAct, Status> {
    let command = Sanitize::decode(sqe);
    if given {
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    if let SanitizePhase::InProgress(_) = state.sanitize.phase {
        return Err(Status::SANITIZE_IN_PROGRESS.with_dnr());
    }
    let has_failed = state.sanitize.phase == SanitizePhase::Failed;
    let is_restricted = has_failed && !state.sanitize.command.ause;
    match command.sanact {
        // Out of a restricted failure only another restricted operation leads.
        Sanitize::EXIT_FAILURE if is_restricted => Err(Status::SANITIZE_FAILED.with_dnr()),
        Sanitize::EXIT_FAILURE => Ok(PoolAct::Sanitize(command)),
        Sanitize::BLOCK_ERASE | Sanitize::OVERWRITE => {
            if is_restricted && command.ause {
                return Err(Status::SANITIZE_FAILED.with_dnr());
            }
            if command.ndas || command.emvs {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            Ok(PoolAct::Sanitize(command))
        }
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// Whether a command is carried out while an operation is under way or has failed (Base 2.1,
/// 8.1.24, "Sanitize Operations - Admin Commands Allowed"). What the command itself allows is
/// another matter.
pub(crate) fn allows(opcode: AdminOpcode) -> bool {
    !matches!(
        opcode,
        AdminOpcode::NamespaceManagement
            | AdminOpcode::NamespaceAttachment
            | AdminOpcode::FormatNvm
            | AdminOpcode::DeviceSelfTest
            | AdminOpcode::GetLbaStatus
    )
}

/// The log page Sanitize Status. Whether something was written since is not known: so it never says
/// that all is erased.
pub(crate) fn page(status: &SanitizeStatus) -> SanitizeLog {
    let (sos, progress) = match status.phase {
        SanitizePhase::Never => (sos::NEVER, SanitizeLog::NO_PROGRESS),
        SanitizePhase::InProgress(parts) => (sos::IN_PROGRESS, parts.min(0xfffe)),
        SanitizePhase::Successful => (sos::SUCCESSFUL, SanitizeLog::NO_PROGRESS),
        SanitizePhase::Failed | SanitizePhase::FailureLeft => {
            (sos::FAILED, SanitizeLog::NO_PROGRESS)
        }
    };
    let none = SanitizeLog::NO_ESTIMATE;
    SanitizeLog {
        sprog: progress,
        sstat: SanitizeState::new().with_sos(sos).with_opc(status.passes & 0x1f),
        scdw10: if sos == sos::NEVER { 0 } else { status.command.dword10() },
        eto: none,
        etbe: none,
        etce: none,
        etond: none,
        etbend: none,
        etcend: none,
        ..SanitizeLog::default()
    }
}
