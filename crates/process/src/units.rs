//! Numbers with units, in short form.

/// Formats a number with three digits: `987`, `43.9 K`, `1.24 M`.
#[must_use]
pub fn count(value: f64) -> String {
    let units = [(1e9, " G"), (1e6, " M"), (1e3, " K")];
    for (unit, name) in units {
        if value >= unit {
            return format!("{}{name}", significant(value / unit));
        }
    }
    format!("{value:.0}")
}

/// Formats bytes per second: `171 MiB/s`.
#[must_use]
pub fn bandwidth(bytes: f64) -> String {
    let units = [(30, "GiB/s"), (20, "MiB/s"), (10, "KiB/s")];
    for (shift, name) in units {
        let unit = (1u64 << shift) as f64;
        if bytes >= unit {
            return format!("{} {name}", significant(bytes / unit));
        }
    }
    format!("{bytes:.0} B/s")
}

/// Formats bytes: `4 KiB`, `1 MiB`; or `512 bytes` if no unit divides the number.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = units.iter().find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    whole.map_or_else(
        || format!("{bytes} bytes"),
        |(shift, name)| format!("{} {name}", bytes >> shift),
    )
}

/// Formats a time in nanoseconds: `740 ns`, `12.3 us`.
#[must_use]
pub fn nanoseconds(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "us")];
    for (unit, name) in units {
        if ns >= unit {
            return format!("{} {name}", significant(ns / unit));
        }
    }
    format!("{ns:.0} ns")
}

/// Formats events per I/O with two decimals, or with four below 0.01.
#[must_use]
pub fn per_io(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value >= 0.01 {
        format!("{value:.2}")
    } else if value >= 0.000_05 {
        format!("{value:.4}")
    } else {
        "<0.0001".to_owned()
    }
}

/// Formats a value of at least 1 with three significant digits.
fn significant(value: f64) -> String {
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (43_900.0, "43.9 K"),
            (184_200.0, "184 K"),
            (1.239e6, "1.24 M"),
        ] {
            assert_eq!(count(value), text);
        }
        assert_eq!(bandwidth(1000.0), "1000 B/s");
        assert_eq!(bandwidth(179_306_496.0), "171 MiB/s");
        assert_eq!((bytes(512), bytes(4096)), ("512 bytes".into(), "4 KiB".into()));
        assert_eq!((bytes(3 << 20), bytes(1536)), ("3 MiB".into(), "1536 bytes".into()));
        assert_eq!(nanoseconds(740.0), "740 ns");
        assert_eq!(nanoseconds(12_300.0), "12.3 us");
        assert_eq!(nanoseconds(99_960.0), "100 us");
        for (value, text) in
            [(0.0, "0"), (1.99, "1.99"), (0.0012, "0.0012"), (0.000_001, "<0.0001"), (0.3, "0.30")]
        {
            assert_eq!(per_io(value), text);
        }
    }
}
