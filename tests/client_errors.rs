//! What the Rust client answers where the caller, and not a message, is at fault: a role without the right to produce, and a
//! value that is no JSON. What is wrong with messages is in client.rs.

use std::{collections::BTreeMap, error::Error as _};

use millstream::client::{Client, Error, ProduceOptions, Produced};

use crate::support::engine::Project;

const STREAMS: &str = "[streams.orders]\n[streams.receipts]";

fn plain() -> ProduceOptions {
    ProduceOptions::default()
}

async fn stored(project: &Project) -> i64 {
    project
        .number("select (select count(*) from {schema}.message_log_1) + (select count(*) from {schema}.message_log_2)")
        .await
}

/// Goal: a role that was granted one stream is told which right it lacks for another, in each way to produce, and only that
/// call fails.
#[tokio::test]
async fn a_role_without_the_right_to_produce_is_forbidden_and_stores_nothing() {
    let project = Project::declare(STREAMS).await;
    let name: String =
        sqlx::query_scalar("select current_database()::text").fetch_one(&project.database.pool).await.unwrap();
    let role = format!("client_of_{name}");
    project.run(&format!("create role {role} nologin; select {{schema}}.grant_produce('{role}', 'orders')")).await;
    let client = Client::connect(&format!("{}&options=-crole%3D{role}", project.database.url().await)).await.unwrap();
    let (orders, receipts) = (client.stream::<str>("orders"), client.stream::<str>("receipts"));
    // Asked for together: the refused one does not take the other with it.
    let (granted, refused) = tokio::join!(orders.produce("1", plain()), receipts.produce("payload-7", plain()));
    granted.expect("it was granted");
    let in_transaction = client
        .in_transaction(async |tx| {
            orders.produce_in_tx(tx, "2", plain()).await?;
            receipts.produce_in_tx(tx, "payload-7", plain()).await
        })
        .await;
    let batch = receipts.produce_batch([("payload-7", plain()), ("payload-8", plain())]).await;
    for (way, told) in
        [("alone", refused.map(drop)), ("transaction", in_transaction.map(drop)), ("batch", batch.map(drop))]
    {
        let error = told.expect_err(way);
        assert!(matches!(&error, Error::Forbidden(refusal) if refusal.sqlstate == "42501"), "{way}: {error:?}");
        let text = format!("{error} {error:?}");
        assert!(
            text.contains("permission denied for function produce_2") && !text.contains("payload-"),
            "{way}: {text}"
        );
    }
    assert_eq!(stored(&project).await, 1, "what was granted, alone");
    project.run(&format!("select {{schema}}.grant_produce('{role}', 'receipts')")).await;
    receipts.produce("3", plain()).await.expect("it is granted now");
    client.close().await;
    project.run(&format!("drop owned by {role}; drop role {role}")).await;
}

/// Goal: a value that cannot be written as JSON reaches no connection, and the error has the reason behind it.
#[tokio::test]
async fn a_value_that_is_no_json_is_an_error_of_its_own_and_stores_nothing() {
    let project = Project::declare(STREAMS).await;
    let client = Client::connect(&project.database.url().await).await.unwrap();
    let orders = client.stream::<BTreeMap<(u8, u8), u8>>("orders");
    let value = BTreeMap::from([((1, 2), 3)]); // the keys of an object are strings
    let empty = BTreeMap::new();
    let in_transaction: Result<Produced, Error> =
        client.in_transaction(async |tx| orders.produce_in_tx(tx, &value, plain()).await).await;
    let batch = orders.produce_batch([(&empty, plain()), (&value, plain())]).await;
    for told in [orders.produce(&value, plain()).await.map(drop), in_transaction.map(drop), batch.map(drop)] {
        let error = told.expect_err("it is no JSON");
        assert!(matches!(error, Error::Encode(_)), "{error:?}");
        assert_eq!(error.to_string(), "write the payload as JSON");
        assert_eq!(error.source().map(ToString::to_string).as_deref(), Some("key must be a string"));
    }
    assert_eq!(stored(&project).await, 0);
    orders.produce(&empty, plain()).await.expect("an empty one is an object");
    assert_eq!(stored(&project).await, 1);
    client.close().await;
}
