//! Sanitize: erases all data of all namespaces of the pool. Base 2.1, 5.1.22, 5.1.12.1.33 and
//! 8.1.24.

use crate::pool::{PoolAct, PoolState, SanitizePhase, SanitizeStatus};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Sanitize;
use shadowbell_spec::identify::Sanicap;
use shadowbell_spec::log::{SanitizeLog, SanitizeState, sos};
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::status::Status;

/// Sanitize capabilities (SANICAP). Blocks are always deallocated, and a command with
/// No-Deallocate After Sanitize is refused: without the Sanitize Config feature, No-Deallocate
/// Response Mode is 0.
pub(crate) fn capabilities() -> Sanicap {
    Sanicap::new().with_bes(true).with_ows(true).with_ndi(true).with_nodmmas(1)
}

/// Decodes and checks a Sanitize command. `given` is true if the controller has namespaces outside
/// the pool. The command is then refused: it would have to erase these namespaces too, and the host
/// must not erase them.
///
/// # Errors
/// The completion status of the command.
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
        // After a failed restricted operation, the host cannot exit the failure mode; it can only
        // start another restricted operation.
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

/// True if the command is allowed while a sanitize operation is in progress or has failed (Base
/// 2.1, 8.1.24, "Sanitize Operations - Admin Commands Allowed"). Further checks are part of the
/// command's execution.
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

/// Sanitize Status log page. Writes after a sanitize operation are not tracked, so Global Data
/// Erased is never set.
pub(crate) fn page(status: &SanitizeStatus) -> SanitizeLog {
    let (sos, progress) = match status.phase {
        SanitizePhase::Never => (sos::NEVER, SanitizeLog::NO_PROGRESS),
        SanitizePhase::InProgress(parts) => (sos::IN_PROGRESS, parts.min(0xfffe)),
        SanitizePhase::Successful => (sos::SUCCESSFUL, SanitizeLog::NO_PROGRESS),
        SanitizePhase::Failed | SanitizePhase::FailureModeExited => {
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
