//! `millstream seek GROUP --key KEY`: sends one key to another point of its history.

use std::time::Duration;

use anyhow::Result;

use super::{
    Global, human,
    output::visible,
    seek::{Seek, again_when_busy},
    with_database::with_database,
};
use crate::engine::{self, KeySeeked, preview_seek_key};

/// How long it waits for what runs of the key: longer than most handlers may take.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn run(global: &Global, asked: &Seek, key: &str) -> Result<()> {
    let seeked = with_database(global, async |database, _| {
        if asked.dry_run || !asked.confirmation.yes {
            let would =
                again_when_busy(async || preview_seek_key(database, &asked.group, key, &asked.to).await).await?;
            if asked.dry_run {
                return Ok(would);
            }
            asked.confirmation.ask(&format!("send {}", what(&would)))?;
        }
        again_when_busy(async || engine::seek_key(database, &asked.group, key, &asked.to, PATIENCE).await).await
    })
    .await?;
    global
        .output()
        .one(&seeked, |seeked| format!("{} {}\n", if seeked.dry_run { "would send" } else { "sent" }, what(seeked)))
}

fn what(seeked: &KeySeeked) -> String {
    let mut text =
        format!("key {} of {} to position {}", visible(&seeked.key), visible(&seeked.group), seeked.position);
    let parts = [
        (seeked.replayed, "messages come again"),
        (seeked.reset, "that waited begin again"),
        (seeked.skipped, "that waited are skipped, and are dead letters"),
        (seeked.dead_letters_replayed, "dead letters stay, and their messages come again"),
    ];
    let parts: Vec<_> = parts.iter().filter(|(count, _)| *count > 0).collect();
    if parts.is_empty() {
        text.push_str(": it has no message there");
    }
    for (place, (count, what)) in parts.iter().enumerate() {
        text.push_str(if place == 0 { ": " } else { ", " });
        text.push_str(&format!("{} {what}", human::count(count.unsigned_abs())));
    }
    text
}
