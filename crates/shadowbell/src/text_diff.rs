//! Difference of two texts, by lines.

/// Maximum number of pairs of lines that are compared. Above it, the whole part between the common
/// start and the common end counts as replaced.
const MAX_PAIRS: usize = 4 << 20;
/// Number of unchanged lines that are shown around a change.
const CONTEXT: usize = 3;

/// Lines that are removed (`-`), added (`+`) and, around them, unchanged. A line `...` stands for
/// further unchanged lines.
pub(crate) fn difference(before: &str, after: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) =
        (before.split_inclusive('\n').collect(), after.split_inclusive('\n').collect());
    let lines = edits(&old, &new);
    let changed: Vec<_> = (0..lines.len()).filter(|at| lines[*at].0 != ' ').collect();
    let is_shown = |at: usize| {
        let next = changed.partition_point(|change| change + CONTEXT < at);
        changed.get(next).is_some_and(|change| *change <= at + CONTEXT)
    };
    let mut text = String::new();
    for (at, (sign, line)) in lines.iter().enumerate() {
        if is_shown(at) {
            // A line break that is missing or has another form is visible, too.
            let (content, end) = match line.strip_suffix('\n') {
                Some(content) => (content, ""),
                None => (*line, " (no line break)"),
            };
            text.push_str(&format!("{sign} {content}{end}\n"));
        } else if at == 0 || is_shown(at - 1) {
            text.push_str("...\n");
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// Shortest sequence of removed, added and unchanged lines that turns `old` into `new`.
fn edits<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(char, &'a str)> {
    let start = old.iter().zip(new).take_while(|(one, other)| one == other).count();
    let rest = old[start..].iter().rev().zip(new[start..].iter().rev());
    let end = rest.take_while(|(one, other)| one == other).count();
    let (a, b) = (&old[start..old.len() - end], &new[start..new.len() - end]);
    // Lengths of the longest common subsequences of the rests of `a` and `b`.
    let width = b.len() + 1;
    let is_compared = a.len().saturating_mul(b.len()) <= MAX_PAIRS;
    let mut common = vec![0_u32; if is_compared { (a.len() + 1) * width } else { 0 }];
    if is_compared {
        for i in (0..a.len()).rev() {
            for j in (0..b.len()).rev() {
                common[i * width + j] = match a[i] == b[j] {
                    true => common[(i + 1) * width + j + 1] + 1,
                    false => common[(i + 1) * width + j].max(common[i * width + j + 1]),
                };
            }
        }
    }
    let mut lines: Vec<_> = old[..start].iter().map(|line| (' ', *line)).collect();
    let (mut i, mut j) = (0, 0);
    while i < a.len() || j < b.len() {
        let is_both = is_compared && i < a.len() && j < b.len();
        if is_both && a[i] == b[j] {
            lines.push((' ', a[i]));
            (i, j) = (i + 1, j + 1);
        } else if i < a.len()
            && (!is_both || common[(i + 1) * width + j] >= common[i * width + j + 1])
        {
            lines.push(('-', a[i]));
            i += 1;
        } else {
            lines.push(('+', b[j]));
            j += 1;
        }
    }
    lines.extend(old[old.len() - end..].iter().map(|line| (' ', *line)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_occur_elsewhere_are_part_of_the_difference() {
        let before = "[a]\nread-only = true\n[b]\nread-only = true\n";
        for (after, expected) in [
            (
                "[a]\n[b]\nread-only = true\n",
                "  [a]\n- read-only = true\n  [b]\n  read-only = true",
            ),
            (
                "[b]\nread-only = true\n[a]\n",
                "- [a]\n- read-only = true\n  [b]\n  read-only = true\n+ [a]",
            ),
            (
                &before[..before.len() - 1],
                "  [a]\n  read-only = true\n  [b]\n- read-only = true\n+ read-only = true (no line break)",
            ),
        ] {
            assert_eq!(difference(before, after), expected);
        }
        assert_eq!(difference(before, before), "...");
    }

    #[test]
    fn distant_lines_are_left_out() {
        let text = |name: &str| format!("{}{name}\n{}", "x\n".repeat(9), "y\n".repeat(9));
        let expected = "...\n  x\n  x\n  x\n- one\n+ two\n  y\n  y\n  y\n...";
        assert_eq!(difference(&text("one"), &text("two")), expected);
    }

    /// The lines with `-` and the unchanged ones are the first text, and the lines with `+` and the
    /// unchanged ones the second one.
    #[test]
    fn a_difference_is_complete() {
        let text = |seed: u32, count: u32| -> Vec<String> {
            (0..count).map(|at| format!("{}\n", (at * seed + at * at) % 5)).collect()
        };
        for (seed, count) in (1..40).zip((0..40).chain([3000])).chain([(7, 3000)]) {
            let (old, new) = (text(seed, count), text(seed + 1, count / 2 + seed));
            let lines = |text: &[String]| -> Vec<&'static str> {
                text.iter().map(|line| &*line.clone().leak()).collect()
            };
            let (old, new) = (lines(&old), lines(&new));
            let all = edits(&old, &new);
            for (sign, expected) in [('-', &old), ('+', &new)] {
                let its = all.iter().filter(|(its, _)| [' ', sign].contains(its));
                assert_eq!(&its.map(|(_, line)| *line).collect::<Vec<_>>(), expected);
            }
        }
    }
}
