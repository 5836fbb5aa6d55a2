//! Formatting of figures.

/// Formats a count with three digits: `987`, `43.9 K`, `1.24 M`.
pub fn count(value: f64) -> String {
    let units = [(1e9, " G"), (1e6, " M"), (1e3, " K")];
    match units.iter().find(|(unit, _)| value.abs() >= *unit) {
        Some((unit, name)) => significant(value / unit) + name,
        None => significant(value),
    }
}

/// Formats bytes per second in decimal units: `18.4 GB/s`.
pub fn bandwidth(bytes: f64) -> String {
    count(bytes) + "B/s"
}

/// Formats bytes in binary units: `12.3 KiB`.
pub fn bytes(value: f64) -> String {
    let units = [(1u64 << 30, " GiB"), (1 << 20, " MiB"), (1 << 10, " KiB")];
    match units.iter().find(|(unit, _)| value.abs() >= *unit as f64) {
        Some((unit, name)) => significant(value / *unit as f64) + name,
        None => format!("{value:.0} B"),
    }
}

/// Formats nanoseconds: `740 ns`, `12.3 us`.
pub fn time(ns: f64) -> String {
    let units = [(1e9, " s"), (1e6, " ms"), (1e3, " us")];
    match units.iter().find(|(unit, _)| ns >= *unit) {
        Some((unit, name)) => significant(ns / unit) + name,
        None => format!("{ns:.0} ns"),
    }
}

/// Formats events per I/O with three decimals.
pub fn per_io(value: f64) -> String {
    format!("{value:.3}")
}

/// Formats a percentage.
pub fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

/// Formats a size as options do: `4k`, `1m`.
pub fn size(bytes: u32) -> String {
    match bytes {
        n if n >= 1 << 20 && n % (1 << 20) == 0 => format!("{}m", n >> 20),
        n if n >= 1 << 10 && n % (1 << 10) == 0 => format!("{}k", n >> 10),
        n => n.to_string(),
    }
}

/// Formats three significant digits.
fn significant(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!(count(184_200.0), "184 K");
        assert_eq!(count(6_240_000.0), "6.24 M");
        assert_eq!(bandwidth(18_430_000_000.0), "18.4 GB/s");
        assert_eq!(bytes(65536.0), "64.0 KiB");
        assert_eq!(bytes(100.0), "100 B");
        assert_eq!(time(740.4), "740 ns");
        assert_eq!(time(12_300.0), "12.3 us");
        assert_eq!(per_io(0.0004), "0.000");
        assert_eq!(percent(55.04), "55.0 %");
        assert_eq!([512, 4096, 131_072, 1 << 20].map(size), ["512", "4k", "128k", "1m"]);
    }
}
