//! Numbers as people read them in tables. JSON always has the plain numbers instead.

use std::time::Duration;

/// "12,345".
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// "1 attempt", "3 attempts".
pub fn counted(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", count(number))
}

/// The two largest units: "420ms", "3.2s", "5m 12s", "7h 3m", "2d 4h".
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{}.{}s", seconds, duration.subsec_millis() / 100),
        60..3600 => format!("{minutes}m {}s", seconds % 60),
        3600..86_400 => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// "512 B", "1.5 KiB", "64.0 MiB".
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn one_is_no_plural() {
        let texts = [0, 1, 2000].map(|number| counted(number, "attempt"));
        assert_eq!(texts, ["0 attempts", "1 attempt", "2,000 attempts"]);
    }

    #[test]
    fn durations_have_their_two_largest_units() {
        let texts = [0, 420, 3_200, 312_000, 25_380_000, 187_200_000].map(|ms| duration(Duration::from_millis(ms)));
        assert_eq!(texts, ["0ms", "420ms", "3.2s", "5m 12s", "7h 3m", "2d 4h"]);
    }

    #[test]
    fn sizes_have_one_unit() {
        assert_eq!([512, 1536, 64 << 20, u64::MAX].map(bytes), ["512 B", "1.5 KiB", "64.0 MiB", "16777216.0 TiB"]);
    }
}
