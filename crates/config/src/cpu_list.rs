//! Parser of CPU lists.

use rustix::thread::CpuSet;

/// Maximum number of CPUs in a list: the maximum number of I/O threads.
const MAX_CPUS: usize = shadowbell_controller::MAX_WORKERS;

/// CPUs in the order of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

/// Parses `2,3`, `4-7` or a combination.
///
/// # Errors
/// A sentence about a syntax error, or about a CPU that this process may not use.
pub fn parse(text: &str) -> Result<CpuList, String> {
    let number = |text: &str| {
        let number = text.trim().parse::<usize>();
        number.map_err(|_| format!("`{text}` is no processor; write for example 2,3 or 4-7"))
    };
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("`{part}` is an empty range of processors"));
        }
        if last - first >= MAX_CPUS {
            return Err(format!("`{part}` has more processors than there can be I/O threads"));
        }
        list.extend(first..=last);
    }
    check(&list)?;
    Ok(CpuList(list))
}

/// Parses one CPU number.
///
/// # Errors
/// As [`parse`].
pub fn parse_one(text: &str) -> Result<usize, String> {
    let cpu = text.trim().parse();
    let cpu = cpu.map_err(|_| format!("`{text}` is no processor; write for example 0,2"))?;
    check(&[cpu]).map(|()| cpu)
}

/// Checks that this process may use these CPUs, and that each is listed once.
///
/// # Errors
/// A sentence about the first invalid CPU.
pub fn check(list: &[usize]) -> Result<(), String> {
    if list.len() > MAX_CPUS {
        return Err(format!("more than {MAX_CPUS} processors"));
    }
    let available = shadowbell_memory::processors::processors();
    for (n, cpu) in list.iter().enumerate() {
        if list.iter().take(n).any(|other| other == cpu) {
            return Err(format!("processor {cpu} is named twice"));
        }
        if *cpu >= CpuSet::MAX_CPU || !available.is_set(*cpu) {
            let all: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| available.is_set(*cpu)).collect();
            return Err(format!("this process has no processor {cpu}; it has {all:?}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_have_numbers_and_ranges() {
        let available = rustix::thread::sched_getaffinity(None).unwrap();
        let mine = (0..).find(|cpu| available.is_set(*cpu)).unwrap();
        assert_eq!(parse(&mine.to_string()), Ok(CpuList(vec![mine])));
        assert_eq!(parse(&format!("{mine}-{mine}")), Ok(CpuList(vec![mine])));
        for (text, words) in [
            ("", "no processor"),
            ("a", "no processor"),
            ("0,", "no processor"),
            ("-1", "no processor"),
            ("3-2", "empty range"),
            ("0-100000", "more processors"),
            ("1000000", "has no processor 1000000"),
            (&format!("{mine},{mine}"), "twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
