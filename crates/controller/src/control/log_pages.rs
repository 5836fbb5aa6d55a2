//! Get Log Page: selection of the page, and collection of its data.

use super::admin_port::{Data, Executed, Outcome};
use super::commands::{AdminCommands, CommandEnvironment};
use super::diagnostics::{Diagnostics, areas, media};
use super::lifecycle_state::Lifecycle;
use super::namespace_state::groups;
use crate::admin::TEMPERATURE;
use crate::admin::logs::{self, Health, LogContext};
use crate::admin::persistent_events::{EventContext, Names};
use crate::context::Context;
use crate::namespace::IEEE_OUI;
use crate::subsystem::Member;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::log::persistent_event::action;
use shadowbell_spec::log::{
    CriticalWarning, RETURN_GROUPS_ONLY, SmartHealth, TELEMETRY_BLOCK, lid,
};
use shadowbell_spec::status::Status;
use std::time::Duration;

impl AdminCommands {
    pub(super) fn get_log_page(&mut self, env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let command = GetLogPage::decode(sqe);
        if command.length() > 4096 << env.cx.config.mdts {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if command.lid == lid::RESERVATION_NOTIFICATION && env.cx.config.member.is_some() {
            return self.get_reservation_page(sqe, &command);
        }
        if let (lid::ANA, Some(member)) = (command.lid, &env.cx.config.member) {
            return self.get_ana_page(env.cx, member, sqe, &command);
        }
        if logs::is_elsewhere(command.lid) {
            return self.get_diagnostic_page(env, sqe, &command);
        }
        let self_test = self.diagnostics.self_test.page(&media(env.cx));
        let health = match command.lid {
            lid::SMART_HEALTH => self.health(env),
            _ => Health::default(),
        };
        let pool = env.cx.config.pool.as_ref().map(|pool| pool.state());
        let mut context = LogContext {
            errors: &env.port.errors,
            health: &health,
            self_test: &self_test,
            changed: &mut self.changed,
            uncorrectable: &env.cx.shared.uncorrectable(),
            pool: pool.as_ref(),
            shadow_doorbells: env.cx.config.shadow_doorbells,
            is_shared: env.cx.config.member.is_some(),
            volatile_cache: env.cx.has_volatile_cache(),
        };
        let bytes = logs::read(&command, sqe.nsid, &mut context)?;
        let (len, log) = (command.length() as usize, Some((command.lid, command.rae)));
        Ok(Outcome::Data(Data { bytes, len, dw0: 0, log }))
    }

    /// Executes Get Log Page for telemetry and persistent events, which the command can change.
    fn get_diagnostic_page(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
        command: &GetLogPage,
    ) -> Executed {
        /// LSP value: Create Telemetry Host-Initiated Data.
        const CREATE: u8 = 1;
        logs::check(command, sqe.nsid)?;
        let context = self.event_context(env.lifecycle);
        let names = || {
            let (sn, mn, subnqn) = self.identity.names();
            Names { sn, mn, subnqn }
        };
        let [a, b, c] = IEEE_OUI;
        let page = match command.lid {
            lid::PERSISTENT_EVENTS => {
                let names = names();
                self.diagnostics.events.read(command, &names, &context)?
            }
            of => {
                let Diagnostics { telemetry, events, .. } = &mut self.diagnostics;
                if of == lid::TELEMETRY_HOST && command.lsp & CREATE != 0 {
                    telemetry.capture(&areas(
                        env.cx,
                        env.lifecycle,
                        &env.port.errors,
                        events.len(),
                    ));
                    let page = telemetry.page(of, [c, b, a]);
                    events.telemetry_created(&context, &page[..TELEMETRY_BLOCK]);
                }
                telemetry.page(of, [c, b, a])
            }
        };
        let bytes = match command.lsp & 0b11 {
            // Action Release Context transfers no data.
            action::RELEASE if command.lid == lid::PERSISTENT_EVENTS => Vec::new(),
            _ => logs::part(command, &page)?,
        };
        if command.lid == lid::TELEMETRY_CONTROLLER && !command.rae {
            self.diagnostics.telemetry.was_read();
        }
        let (len, log) = (command.length() as usize, Some((command.lid, command.rae)));
        Ok(Outcome::Data(Data { bytes, len, dw0: 0, log }))
    }

    /// Current time and identity for persistent events.
    pub(super) fn event_context(&self, lifecycle: &Lifecycle) -> EventContext {
        EventContext {
            cntlid: self.identity.cntlid(),
            timestamp: self.features.timestamp(),
            powered: lifecycle.since.elapsed(),
            power_cycles: lifecycle.power_cycles,
        }
    }

    /// SMART / Health Information log page.
    pub(super) fn health_page(&self, env: &CommandEnvironment<'_>) -> SmartHealth {
        self.health(env).page()
    }

    pub(super) fn health(&self, env: &CommandEnvironment<'_>) -> Health {
        let CommandEnvironment { cx, lifecycle, port, queues, .. } = env;
        // Counters are read directly, without a message to the I/O threads.
        let io = cx.shared.io();
        let busy = queues.workers().map(|worker| cx.pool.busy(cx.route.resolve(worker))).max();
        Health {
            bytes_read: io.bytes_read,
            bytes_written: io.bytes_written + io.bytes_copied,
            host_reads: io.reads + io.copies,
            host_writes: io.writes + io.copies,
            media_errors: io.media_errors,
            busy: busy.unwrap_or(Duration::ZERO),
            powered: lifecycle.since.elapsed(),
            power_cycles: lifecycle.power_cycles,
            unsafe_shutdowns: lifecycle.unsafe_shutdowns,
            error_log_entries: port.errors.count(),
            warning: CriticalWarning::new()
                .with_temperature(self.features.temperature_warning(TEMPERATURE)),
            ..Health::default()
        }
    }

    /// Executes Get Log Page, Asymmetric Namespace Access.
    fn get_ana_page(
        &mut self,
        cx: &Context,
        member: &Member,
        sqe: &Sqe,
        command: &GetLogPage,
    ) -> Executed {
        logs::check(command, sqe.nsid)?;
        self.ana.review(cx);
        let groups_only = command.lsp & RETURN_GROUPS_ONLY != 0;
        let page = self.ana.changes.page(&groups(cx, member), groups_only);
        let bytes = logs::part(command, &page)?;
        let (len, log) = (command.length() as usize, Some((lid::ANA, command.rae)));
        Ok(Outcome::Data(Data { bytes, len, dw0: 0, log }))
    }

    /// Executes Get Log Page, Reservation Notification. Removes the notification that the host has
    /// read, unless RAE is set.
    fn get_reservation_page(&mut self, sqe: &Sqe, command: &GetLogPage) -> Executed {
        logs::check(command, sqe.nsid)?;
        let bytes = logs::part(command, &self.reservations.page())?;
        if !command.rae {
            self.reservations.was_read();
        }
        let (len, log) = (command.length() as usize, Some((command.lid, command.rae)));
        Ok(Outcome::Data(Data { bytes, len, dw0: 0, log }))
    }
}
