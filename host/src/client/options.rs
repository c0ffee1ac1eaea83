//! What a message has beside its payload. Checked by Postgres, like that of every other producer.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::Error;
use crate::{
    database::Refusal,
    handler::{Concurrency, NewMessage},
};

/// What a message has beside its payload; nothing by default.
///
/// ```
/// use millstream::client::{Concurrency, ProduceOptions};
///
/// let options = ProduceOptions {
///     message_key: Some("account-7".to_owned()),
///     concurrency: Some(Concurrency::Ordered),
///     idempotency_key: Some("transfer-4127".to_owned()),
///     ..ProduceOptions::default()
/// };
/// assert!(options.rank.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProduceOptions {
    /// What the message is about; 1 to 1,024 bytes.
    pub message_key: Option<String>,
    /// How messages of the key may overlap; needs a key. `None`: the stream's key policy decides.
    pub concurrency: Option<Concurrency>,
    /// Whether the newest version of the key replaces older ones; needs a key. `None`: the stream's key policy decides.
    pub compaction: Option<bool>,
    /// Of a version, 0 or more; the highest wins. Only beside compaction.
    pub rank: Option<i64>,
    /// A second message with this key is not stored: the first one's id and `duplicate` are the answer, for
    /// `idempotency_ttl` of the stream. 1 to 1,024 bytes. It is logged, so build it from ids.
    pub idempotency_key: Option<String>,
    /// What groups may filter by; up to 1,024 bytes.
    pub routing_key: Option<String>,
    /// Up to 64 KiB.
    pub headers: BTreeMap<String, String>,
    /// Up to 255 bytes. `None`: `application/json` for a JSON stream, nothing for a raw one.
    pub content_type: Option<String>,
    /// Delivered not before this time, by the database's clock. Beats `delay`.
    pub deliver_after: Option<SystemTime>,
    /// Delivered not before so long after the produce.
    pub delay: Option<Duration>,
}

/// A message on its way, owned.
#[derive(Debug)]
pub(super) struct Entry {
    pub message: NewMessage,
    /// RFC 3339.
    pub deliver_after: Option<String>,
}

impl ProduceOptions {
    pub(super) fn entry(self, payload: Option<Vec<u8>>, content_type: Option<&str>) -> Result<Entry, Error> {
        let content_type = self.content_type.or_else(|| content_type.filter(|_| payload.is_some()).map(str::to_owned));
        let message = NewMessage {
            stream: String::new(), // a batch goes to one stream, which is named once
            payload,
            key: self.message_key,
            concurrency: self.concurrency,
            compaction: self.compaction,
            rank: self.rank,
            idempotency_key: self.idempotency_key,
            routing_key: self.routing_key,
            headers: self.headers.into_iter().collect(),
            content_type,
            delay: self.delay,
        };
        Ok(Entry { message, deliver_after: self.deliver_after.map(rfc3339).transpose()? })
    }
}

/// A time before 1970 has passed, whichever it is.
fn rfc3339(time: SystemTime) -> Result<String, Error> {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = time::Duration::try_from(since).ok().and_then(|since| OffsetDateTime::UNIX_EPOCH.checked_add(since));
    time.and_then(|time| time.format(&Rfc3339).ok()).ok_or_else(|| {
        Error::AttributeInvalid(Refusal {
            sqlstate: "MS010".to_owned(),
            message: "deliver_after is later than the year 9999".to_owned(),
            hint: Some("Give an earlier time.".to_owned()),
            constraint: None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_rfc_3339_and_one_without_a_date_is_refused() {
        let written = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(written(1_924_992_000).expect("a date"), "2031-01-01T00:00:00Z");
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_secs(9)).expect("past"), "1970-01-01T00:00:00Z");
        assert!(matches!(written(300_000_000_000), Err(Error::AttributeInvalid(_))));
    }

    #[test]
    fn a_tombstone_has_no_content_type_of_its_own() {
        let entry = |payload| ProduceOptions::default().entry(payload, Some("application/json")).expect("no time");
        assert_eq!(entry(None).message.content_type, None);
        assert_eq!(entry(Some(vec![])).message.content_type.as_deref(), Some("application/json"));
    }
}
