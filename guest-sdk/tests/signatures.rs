//! Goal: every documented signature is a handler, and no Debug output holds a payload. Method: the attribute itself, one
//! function a test, and a delivery to it. That wrong signatures are refused is tested beside the attribute.

use std::fmt;

use millstream_guest::{
    Context, Message, Outcome,
    testing::{TestMessage, deliver},
};

macro_rules! check {
    ($name:ident, $handler:item, $payload:expr, $outcome:pat) => {
        #[test]
        fn $name() {
            #[millstream_guest::handler]
            $handler
            let delivered = deliver(handle, TestMessage::text($payload));
            assert!(matches!(delivered.outcome, $outcome), "{delivered:?}");
        }
    };
}

check!(
    takes_a_message,
    fn handle(_: Message) -> Outcome {
        Outcome::Done
    },
    "x",
    Outcome::Done
);
check!(
    takes_a_payload,
    fn handle(n: u32) {
        assert_eq!(n, 7)
    },
    "7",
    Outcome::Done
);
check!(
    takes_payload_and_context,
    fn handle(_: u32, ctx: Context) {
        assert_eq!(ctx.id, 1)
    },
    "7",
    Outcome::Done
);
check!(
    answers_a_result,
    fn handle(_: u32) -> Result<(), fmt::Error> {
        Err(fmt::Error)
    },
    "7",
    Outcome::Retry { .. }
);
check!(
    answers_anyhow,
    fn handle(_: u32) -> anyhow::Result<Outcome> {
        anyhow::bail!("no")
    },
    "7",
    Outcome::Retry { .. }
);
check!(
    answers_a_text,
    fn handle(_: u32) -> Result<(), String> {
        Err("no".into())
    },
    "7",
    Outcome::Retry { .. }
);
check!(
    rejects_another_payload,
    fn handle(_: u32) {
        unreachable!()
    },
    "[]",
    Outcome::Reject { .. }
);

#[test]
fn produce_outside_of_a_delivery_says_so() {
    let message = TestMessage::text("{}").into_message();
    let error =
        message.produce("receipts", millstream_guest::NewMessage::bytes("x")).expect_err("there is no delivery");
    assert!(error.to_string().contains("testing::deliver"), "{error}");
}

#[test]
fn debug_output_never_holds_a_payload() {
    let message = TestMessage::text("secret").into_message();
    let new = millstream_guest::NewMessage::bytes("secret");
    let text = format!("{message:?} {new:?}");
    assert!(!text.contains("secret") && !text.contains("115"), "{text}");
    assert!(text.contains("payload_bytes: Some(6)"), "{text}");
}
