//! Every world that was once given to handler authors keeps loading. Method: components as they were built then, kept in
//! `golden/` and never built anew; each is loaded and delivers.

use std::{path::Path, sync::Arc};

use millstream::handler::Outcome;

use crate::support::handlers::{deliver, group_settings, sandbox};

/// A file that was made from the example `order-email` with the SDK and the contract of that version. Add one with each
/// version of the contract; one that exists is never replaced once its version is released.
const ORDER_EMAIL: [&str; 1] = ["order-email-0.1.0.wasm"];

#[tokio::test]
async fn handlers_of_every_contract_so_far_load_and_produce() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), ORDER_EMAIL.len(), "each file is listed here");
    for file in ORDER_EMAIL {
        let bytes = std::fs::read(folder.join(file)).unwrap();
        let sandbox = sandbox().await;
        let compiled = sandbox.load(file, bytes).await.unwrap_or_else(|error| panic!("{file} {error}"));
        let handler = sandbox.handler(compiled, Arc::new(group_settings(|_| {})));
        let order = r#"{"order_id": "o-1", "customer": "a@example.com", "amount_cents": 1205, "currency": "EUR"}"#;
        let finished = deliver(&handler, order).await;
        assert_eq!((&finished.outcome, finished.produced.len()), (&Outcome::Done, 1), "{file}");
        let receipt: serde_json::Value =
            serde_json::from_slice(finished.produced[0].payload.as_ref().unwrap()).unwrap();
        assert_eq!((&receipt["order_id"], &receipt["total"]), (&"o-1".into(), &"12.05 EUR".into()), "{file}");
        assert!(matches!(deliver(&handler, "{}").await.outcome, Outcome::Reject { .. }), "{file}");
    }
}
