//! Durations ("30s", "1h30m") and sizes ("64MiB") as people write them in streams.toml and on the command line.

use std::time::Duration;

/// Largest duration that is accepted: Postgres intervals and `Duration` arithmetic both hold it with room to spare.
const MILLISECONDS_MAX: u64 = 100 * 365 * DAY;
const DAY: u64 = 24 * 60 * 60 * 1000;

const DURATION_UNITS: [(&str, u64); 5] = [("d", DAY), ("h", 60 * 60 * 1000), ("m", 60 * 1000), ("s", 1000), ("ms", 1)];

const SIZE_UNITS: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1000),
    ("B", 1),
];

/// Reads "500ms", "30s", "5m", "24h", "7d" or a run of them such as "1h30m".
///
/// # Errors
/// Returns what to write instead, as a hint for a person.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let example = || "write a number and a unit, for example \"30s\"; units are ms, s, m, h, d".to_owned();
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(example());
    }
    let mut total_ms: u64 = 0;
    while !rest.is_empty() {
        let (number, after) = split_number(rest);
        if after.starts_with('.') {
            return Err("no fractions: write \"1500ms\" instead of \"1.5s\"".to_owned());
        }
        let unit_end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_end);
        let scale = DURATION_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale);
        let (Ok(count), Some(scale)) = (number.parse::<u64>(), scale) else { return Err(example()) };
        total_ms = count
            .checked_mul(scale)
            .and_then(|ms| ms.checked_add(total_ms))
            .filter(|ms| *ms <= MILLISECONDS_MAX)
            .ok_or("at most 100 years, which is \"36500d\"")?;
        rest = next;
    }
    Ok(Duration::from_millis(total_ms))
}

/// Reads "64MiB", "1KiB", "10MB" or a plain number of bytes.
///
/// # Errors
/// Returns what to write instead, as a hint for a person.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let example =
        || "write a number and a unit, for example \"64MiB\"; units are B, KiB, MiB, GiB, KB, MB, GB".to_owned();
    let (number, rest) = split_number(text.trim());
    let unit = rest.trim_start();
    let Ok(count) = number.parse::<u64>() else { return Err(example()) };
    if unit.is_empty() {
        return Ok(count);
    }
    let Some((_, scale)) = SIZE_UNITS.iter().find(|(name, _)| *name == unit) else {
        let near = SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        return Err(near.map_or_else(example, |(name, _)| format!("did you mean \"{count}{name}\"?")));
    };
    count.checked_mul(*scale).ok_or_else(|| "that is more bytes than a computer can count".to_owned())
}

/// Writes a duration the way it is read: "1h30m", "500ms", "0s".
pub fn duration_text(duration: Duration) -> String {
    let mut rest = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, scale) in DURATION_UNITS {
        if rest >= scale {
            text.push_str(&format!("{}{unit}", rest / scale));
            rest %= scale;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Writes a size the way it is read, in the largest binary unit that divides it: "64MiB", "1500B".
pub fn size_text(bytes: u64) -> String {
    let unit = SIZE_UNITS[..3].iter().find(|(_, scale)| bytes > 0 && bytes.is_multiple_of(*scale));
    unit.map_or_else(|| format!("{bytes}B"), |(name, scale)| format!("{}{name}", bytes / scale))
}

fn split_number(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written_alike() {
        for text in ["0s", "1ms", "500ms", "30s", "5m", "24h", "1h30m", "7d", "36500d"] {
            let duration = parse_duration(text).unwrap();
            assert_eq!(parse_duration(&duration_text(duration)).unwrap(), duration, "{text}");
        }
        assert_eq!(parse_duration("1h30m").unwrap(), Duration::from_secs(5400));
        assert_eq!(duration_text(Duration::from_secs(86_400)), "1d");
    }

    #[test]
    fn broken_durations_are_refused() {
        for text in
            ["", " ", "30", "s", "30 s", "30sec", "-1s", "1.5s", "1s2", "99999999999999999999d", "36501d", "3×s"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_and_written_alike() {
        for text in ["0", "1", "1B", "1500B", "1KiB", "64MiB", "64 MiB", "2GiB", "10MB"] {
            let bytes = parse_size(text).unwrap();
            assert_eq!(parse_size(&size_text(bytes)).unwrap(), bytes, "{text}");
        }
        assert_eq!(parse_size("10MB").unwrap(), 10_000_000);
        assert_eq!(size_text(64 << 20), "64MiB");
    }

    #[test]
    fn broken_sizes_are_refused() {
        for text in ["", "MiB", "-1", "1.5MiB", "1TiB", "18446744073709551615GiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(parse_size("64mib").unwrap_err(), "did you mean \"64MiB\"?");
    }
}
