//! The flags that pick dead letters.

use std::time::Duration;

use clap::{Args, builder::PossibleValuesParser};

use crate::{config::parse_duration, engine::DeadFilter, handler::FailureClass};

#[derive(Args, Clone, Debug, Default)]
pub struct Filter {
    /// Only failures of this class
    #[arg(long, hide_possible_values = true, value_parser = PossibleValuesParser::new(FailureClass::ALL.map(FailureClass::as_str)))]
    pub class: Option<String>,
    /// Only messages with this key
    #[arg(long)]
    pub key: Option<String>,
    /// Only these messages: an id, or a range such as 100..200
    #[arg(long, value_name = "ID|FIRST..LAST", value_parser = parse_ids)]
    pub message: Option<MessageIds>,
    /// Only what died no longer ago than this, such as 30m
    #[arg(long, value_name = "DURATION", value_parser = parse_since)]
    pub since: Option<Duration>,
}

/// A range of message ids, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageIds {
    pub first: Option<i64>,
    pub last: Option<i64>,
}

impl Filter {
    pub fn to_engine(&self) -> DeadFilter {
        DeadFilter {
            class: self.class.clone(),
            key: self.key.clone(),
            first_message_id: self.message.and_then(|ids| ids.first),
            last_message_id: self.message.and_then(|ids| ids.last),
            since: self.since,
        }
    }
}

fn parse_since(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|hint| format!("not a duration: {hint}"))
}

fn parse_ids(text: &str) -> Result<MessageIds, String> {
    let id =
        |text: &str| text.trim().parse::<i64>().map_err(|_| format!("{text:?} is no message id; write 17 or 17..90"));
    let end = |text: &str| if text.is_empty() { Ok(None) } else { id(text).map(Some) };
    match text.split_once("..") {
        None => id(text).map(|id| MessageIds { first: Some(id), last: Some(id) }),
        Some((first, last)) => {
            let ids = MessageIds { first: end(first)?, last: end(last.trim_start_matches('='))? };
            match ids {
                MessageIds { first: None, last: None } => {
                    Err("a range needs an end: write 17..90, 17.. or ..90".to_owned())
                }
                MessageIds { first: Some(first), last: Some(last) } if first > last => {
                    Err(format!("the range ends before it begins: write {last}..{first}"))
                }
                ids => Ok(ids),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_ids_are_one_or_a_range_with_both_ends() {
        let ids = |first, last| Ok(MessageIds { first, last });
        assert_eq!(parse_ids("17"), ids(Some(17), Some(17)));
        assert_eq!(parse_ids("17..90"), ids(Some(17), Some(90)));
        assert_eq!(parse_ids("17.."), ids(Some(17), None));
        assert_eq!(parse_ids("..90"), ids(None, Some(90)));
        for (text, part) in
            [("x", "no message id"), ("..", "needs an end"), ("9..1", "write 1..9"), ("1..x", "no message id")]
        {
            let error = parse_ids(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
