//! Moves units between accounts: the balances, the event that tells of it and the acknowledgement are one COMMIT. However
//! often a delivery is cut, killed or repeated, each transfer counts exactly once.
//!
//! Transfers are ordered messages with the paying account as their key, so that an account pays in the order it was asked to.
//! The accounts are in Postgres; `accounts.sql` beside this file makes them.

use std::error::Error;

use millstream_guest::{Context, NewMessage, Outcome, sql};
use serde::{Deserialize, Serialize};

/// The payload.
#[derive(Deserialize)]
struct Transfer {
    id: String,
    from: String,
    to: String,
    units: i64,
}

#[derive(Deserialize)]
struct Account {
    id: String,
    balance: i64,
}

/// What became of it.
#[derive(Serialize)]
struct Event<'a> {
    transfer: &'a str,
    from: &'a str,
    to: &'a str,
    units: i64,
    state: &'a str,
}

/// In the order of their ids, so that two transfers between the same accounts wait for each other instead of deadlocking.
const LOCK: &str = "select id, balance from account where id in ($1, $2) order by id for update";

const MOVE: &str =
    "update account set balance = balance + case id when $1 then -$3::bigint else $3::bigint end where id in ($1, $2)";

#[millstream_guest::handler]
fn handle(transfer: Transfer, ctx: Context) -> Result<Outcome, Box<dyn Error + Send + Sync>> {
    let Transfer { id, from, to, units } = &transfer;
    if *units <= 0 || from == to {
        return Ok(Outcome::reject("a transfer moves at least one unit to another account"));
    }
    let accounts: Vec<Account> = sql::query(LOCK, (from, to))?;
    let Some(payer) = accounts.iter().find(|account| account.id == *from) else {
        return Ok(Outcome::reject("there is no such account to pay from"));
    };
    if accounts.len() != 2 {
        return Ok(Outcome::reject("there is no such account to pay to"));
    }
    let state = if payer.balance < *units {
        "refused"
    } else {
        sql::execute(MOVE, (from, to, *units))?;
        "moved"
    };
    let event = Event { transfer: id, from, to, units: *units, state };
    ctx.produce("transfers", NewMessage::json(&event)?.key(from))?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use millstream_guest::testing::{Answer, Delivered, TestMessage, deliver};
    use serde_json::json;

    use super::*;

    /// Delivers a transfer of 5 from `a` to `b`, which have these balances.
    fn transfer(accounts: &'static [(&str, i64)]) -> Delivered {
        let message = TestMessage::json(&json!({"id": "t-1", "from": "a", "to": "b", "units": 5}));
        deliver(
            handle,
            message.sql(move |statement, _| {
                Ok(if statement == LOCK {
                    let rows = accounts.iter().map(|(id, balance)| [(*id).into(), (*balance).into()]);
                    Answer::rows(["id", "balance"], rows)
                } else {
                    Answer::count(2)
                })
            }),
        )
    }

    #[test]
    fn moves_what_the_payer_has() {
        let delivered = transfer(&[("a", 5), ("b", 0)]);
        assert_eq!(delivered.outcome, Outcome::Done);
        assert_eq!(delivered.produced[0].json()["state"], "moved");
        assert_eq!(delivered.produced[0].message.key.as_deref(), Some("a"));
        assert_eq!(delivered.statements.len(), 2);
    }

    #[test]
    fn refuses_what_the_payer_has_not() {
        let delivered = transfer(&[("a", 4), ("b", 0)]);
        assert_eq!(delivered.produced[0].json()["state"], "refused");
        assert_eq!(delivered.statements.len(), 1);
    }

    #[test]
    fn rejects_what_can_never_be() {
        assert!(matches!(transfer(&[("a", 5)]).outcome, Outcome::Reject { .. }));
        assert!(matches!(transfer(&[("b", 5)]).outcome, Outcome::Reject { .. }));
        let itself = json!({"id": "t", "from": "a", "to": "a", "units": 5});
        assert!(matches!(deliver(handle, TestMessage::json(&itself)).outcome, Outcome::Reject { .. }));
    }
}
