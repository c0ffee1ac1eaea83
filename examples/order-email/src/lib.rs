//! Checks an order and produces its receipt. What can never be right is rejected; all else is retried.

use std::error::Error;

use millstream_guest::{Context, NewMessage, Outcome, info};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Order {
    order_id: String,
    customer: String,
    amount_cents: i64,
    currency: String,
}

#[derive(Serialize)]
struct Receipt<'a> {
    order_id: &'a str,
    customer: &'a str,
    /// As people read it: `12.50 EUR`.
    total: String,
}

#[millstream_guest::handler]
fn handle(order: Order, ctx: Context) -> Result<Outcome, Box<dyn Error + Send + Sync>> {
    if let Some(fault) = fault(&order) {
        return Ok(Outcome::reject(fault));
    }
    let receipt = Receipt { order_id: &order.order_id, customer: &order.customer, total: total(&order) };
    // Committed together with the acknowledgement: one receipt an order, however often this delivery is repeated.
    ctx.produce("receipts", NewMessage::json(&receipt)?.key(&order.order_id))?;
    info!("receipt for message {}", ctx.id);
    Ok(Outcome::Done)
}

/// What makes an order wrong for ever. It names the field and the rule, never the value: reasons are stored.
fn fault(order: &Order) -> Option<&'static str> {
    let is_currency_code = order.currency.len() == 3 && order.currency.bytes().all(|b| b.is_ascii_uppercase());
    if order.order_id.is_empty() {
        Some("order_id is empty")
    } else if order.customer.is_empty() {
        Some("customer is empty")
    } else if order.amount_cents < 0 {
        Some("amount_cents is negative")
    } else if !is_currency_code {
        Some("currency is not three capital letters, such as EUR")
    } else {
        None
    }
}

/// The amount as people read it.
fn total(order: &Order) -> String {
    format!("{}.{:02} {}", order.amount_cents / 100, order.amount_cents % 100, order.currency)
}

#[cfg(test)]
mod tests {
    use millstream_guest::{
        ProduceError,
        testing::{TestMessage, deliver},
    };
    use serde_json::{Value, json};

    use super::*;

    fn order() -> Value {
        json!({"order_id": "o-1", "customer": "ada@example.com", "amount_cents": 1205, "currency": "EUR"})
    }

    #[track_caller]
    fn check_rejected(field: &str, value: Value, told: &str) {
        let mut order = order();
        order[field] = value;
        let delivered = deliver(handle, TestMessage::json(&order));
        let Outcome::Reject { reason } = delivered.outcome else { panic!("not rejected: {delivered:?}") };
        assert!(reason.contains(told), "{reason:?} does not say {told:?}");
        assert!(delivered.produced.is_empty());
    }

    #[test]
    fn a_good_order_gives_one_receipt_with_its_id_as_key() {
        let delivered = deliver(handle, TestMessage::json(&order()));
        assert_eq!(delivered.outcome, Outcome::Done);
        let [receipt] = &delivered.produced[..] else { panic!("one receipt: {delivered:?}") };
        assert_eq!((receipt.to.as_str(), receipt.message.key.as_deref()), ("receipts", Some("o-1")));
        let expected = json!({"order_id": "o-1", "customer": "ada@example.com", "total": "12.05 EUR"});
        assert_eq!(receipt.json(), expected);
    }

    #[test]
    fn a_broken_order_is_rejected_with_the_field_that_is_wrong() {
        check_rejected("order_id", json!(""), "order_id is empty");
        check_rejected("customer", json!(""), "customer is empty");
        check_rejected("amount_cents", json!(-1), "amount_cents is negative");
        check_rejected("amount_cents", json!("12"), "expected i64");
        check_rejected("currency", json!("euro"), "currency is not three capital letters");
        check_rejected("currency", json!("€"), "currency is not three capital letters");
        check_rejected("currency", Value::Null, "expected a string");
    }

    #[test]
    fn an_order_without_a_field_is_rejected() {
        for field in ["order_id", "customer", "amount_cents", "currency"] {
            let mut order = order();
            order.as_object_mut().expect("an object").remove(field);
            let outcome = deliver(handle, TestMessage::json(&order)).outcome;
            let Outcome::Reject { reason } = outcome else { panic!("not rejected: {outcome:?}") };
            assert!(reason.contains(&format!("missing field `{field}`")), "{reason}");
        }
    }

    #[test]
    fn a_receipt_that_is_refused_is_a_retry() {
        let denied = ProduceError::Denied { stream: "receipts".into() };
        let outcome = deliver(handle, TestMessage::json(&order()).refuse(denied)).outcome;
        let Outcome::Retry { reason } = outcome else { panic!("not retried: {outcome:?}") };
        assert!(reason.contains("allow.produce"), "{reason}");
    }
}
