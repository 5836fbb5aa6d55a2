//! Description of the machine, and its other load.

use std::fs;

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use shadowbell_guest::host;

/// Description of the machine, and a warning if other processes use the CPUs.
pub(crate) fn describe(cpus: [usize; 2]) -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let model = model(&cpuinfo);
    let count = std::thread::available_parallelism().map_or(1, |n| n.get());
    let kernel = read("/proc/sys/kernel/osrelease");
    let mut lines = vec![
        format!("{model}, {count} processors, Linux {kernel}"),
        format!("processors {} and {}: {}", cpus[0], cpus[1], shared_caches(cpus)),
    ];
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
    if load > 0.3 {
        lines.push(format!("the machine has other load ({load}): do not quote these figures"));
    }
    if gives_free_memory_back(&read(REPORTING_ORDER)) {
        lines.push(format!(
            "the kernel reports free pages to this machine's host ({REPORTING_ORDER}). The next use of \
             such a page takes microseconds, so blocks of 64 KiB can be many times too slow on both \
             sides (docs/internals/performance.md: how to measure without it)"
        ));
    }
    lines
}

/// File with the minimum order (blocks of 2^N pages) from which the kernel reports free memory to
/// the hypervisor.
const REPORTING_ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";

/// True if the kernel reports free memory to the hypervisor. The maximum of the order is 10. The
/// value -1, which is printed as an unsigned number, means that no memory is reported.
fn gives_free_memory_back(order: &str) -> bool {
    order.parse::<u64>().is_ok_and(|order| order <= 10)
}

fn model(cpuinfo: &str) -> &str {
    let named = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    named.map_or("unknown processor", |rest| rest.trim_start_matches(['\t', ' ', ':']))
}

/// Caches that two CPUs share, according to the kernel (in a virtual machine, according to the
/// hypervisor).
fn shared_caches([a, b]: [usize; 2]) -> String {
    let mut shared = Vec::new();
    for index in 0..8 {
        let file = |name: &str| {
            let path = format!("/sys/devices/system/cpu/cpu{a}/cache/index{index}/{name}");
            fs::read_to_string(path).map(|text| text.trim().to_owned())
        };
        let (Ok(level), Ok(kind), Ok(list)) =
            (file("level"), file("type"), file("shared_cpu_list"))
        else {
            continue;
        };
        if contains(&list, b) && kind != "Instruction" {
            shared.push(format!("L{level}"));
        }
    }
    match shared.as_slice() {
        [] => "the kernel reports no cache that they share".to_owned(),
        list => format!("the two CPUs share {}", list.join(" and ")),
    }
}

/// True if the kernel's list of CPUs (`0-3,8`) contains `cpu`.
fn contains(list: &str, cpu: usize) -> bool {
    list.split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<usize>().ok();
        matches!((number(first), number(last)), (Some(a), Some(b)) if (a..=b).contains(&cpu))
    })
}

/// Steal time and total time, in clock ticks of all CPUs.
pub(crate) fn stolen() -> Option<(u64, u64)> {
    steal(&fs::read_to_string("/proc/stat").ok()?)
}

fn steal(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // The last two fields (guest time) are left out, because the first two fields include them.
    Some((*fields.get(7)?, fields.iter().take(8).sum()))
}

/// Checks that a program exists. If its Debian package is missing and can be installed, installs
/// it. The error contains the remedy.
pub(crate) fn need(
    program: &str,
    package: &str,
    may_install: bool,
) -> std::result::Result<(), String> {
    if host::in_path(program) {
        return Ok(());
    }
    let missing = format!("{program} is not here: apt-get install {package}");
    if !may_install {
        return Err(missing);
    }
    host::install(&[package]).map_err(|error| format!("{missing} ({error:#})"))?;
    if host::in_path(program) { Ok(()) } else { Err(missing) }
}

/// Pins the calling thread to a CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        bail!("there is no processor {cpu}");
    }
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("running on processor {cpu}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_of_the_kernel_are_parsed() {
        for (list, cpu, is_in) in
            [("0-1", 1, true), ("0", 1, false), ("0,4-6,9", 5, true), ("0,4-6,9", 8, false)]
        {
            assert_eq!(contains(list, cpu), is_in, "{list} {cpu}");
        }
        assert!(!contains("", 0));
    }

    #[test]
    fn free_page_reporting_is_detected() {
        for (order, is_given) in
            [("9", true), ("10", true), ("11", false), ("4294967295", false), ("", false)]
        {
            assert_eq!(gives_free_memory_back(order), is_given, "{order}");
        }
    }

    #[test]
    fn stolen_time_is_the_eighth_field() {
        let stat = "cpu  10 0 20 70 0 1 2 5 7 7\ncpu0 1 1 1 1\n";
        assert_eq!(steal(stat), Some((5, 108)));
        assert_eq!(steal("cpu 1 2 3"), None);
    }

    #[test]
    fn the_processor_has_a_name() {
        assert_eq!(model("processor\t: 0\nmodel name\t: EPYC 9\n"), "EPYC 9");
        assert_eq!(model(""), "unknown processor");
        assert!(describe([0, 0]).len() >= 2);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        assert_eq!(need("sh", "dash", false), Ok(()));
        let why = need("no-such-program", "some-package", false).unwrap_err();
        assert!(why.contains("apt-get install some-package"), "{why}");
    }
}
