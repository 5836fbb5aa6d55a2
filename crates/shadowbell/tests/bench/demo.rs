//! `demo`, with run times too short for meaningful figures.

use crate::harness::{json, line, output};

#[test]
fn the_tables_are_measured_and_both_ends_agree() {
    let report = json(&mut line("demo --runtime 100ms --json"));
    let rows = report["rows"].as_array().unwrap();
    let keys: Vec<_> = rows
        .iter()
        .map(|row| {
            let text = |name: &str| row[name].as_str().unwrap().to_owned();
            let number = |name: &str| row[name].as_u64().unwrap();
            (text("table"), text("doorbells"), number("numjobs"), number("iodepth"))
        })
        .collect();
    let mut expected = Vec::new();
    for (table, jobs, depths) in [("S0", 1, &[32][..]), ("S1", 4, &[32]), ("S3", 1, &[1, 2, 4, 8])]
    {
        for depth in depths {
            for doorbells in ["mmio", "shadow"] {
                expected.push((table.to_owned(), doorbells.to_owned(), jobs, *depth));
            }
        }
    }
    assert_eq!(keys, expected);
    for row in rows {
        assert_eq!(row["device"], "shadowbell");
        assert_eq!(row["bs"], 4096);
        assert!(row["commands"].as_u64().unwrap() > 0, "{row}");
        assert!(row["iops"].as_f64().unwrap() > 0.0, "{row}");
        // Controller and driver must count the same MMIO writes. (With ioeventfds, one signal may
        // stand for several writes.)
        let count = |name: &str| row[name].as_u64().unwrap();
        let (controller, driver) = (count("controller_mmio_writes"), count("driver_mmio_writes"));
        if row["doorbells"] == "mmio" {
            assert_eq!(controller, driver, "{row}");
        } else {
            assert!(controller <= driver && controller * 2 + 4 >= driver, "{row}");
        }
        let writes = row["doorbell_mmio_writes"].as_u64().unwrap();
        assert!(row["driver_mmio_writes"].as_u64().unwrap() >= writes, "{row}");
        if row["doorbells"] == "mmio" {
            assert!(row["driver_mmio_writes"].as_u64() >= row["commands"].as_u64(), "{row}");
        }
    }
}

#[test]
fn the_text_output_has_the_published_figures_for_comparison() {
    let text = output(&mut line("demo --runtime 10ms"));
    for words in [
        "S0: 4 KiB random reads",
        "S1: ",
        "S3: ",
        "43.9 K",
        "184 K",
        "published",
        "measured",
        "count the same doorbell writes",
        "shadowbell serve disk.img",
        "shadowbell bench ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
