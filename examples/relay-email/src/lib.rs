//! The way out to the world: sends what was written in one transaction with a payment to an e-mail provider that fails
//! now and then.
//!
//! A send cannot be rolled back, so it is the last thing done: the request to send commits with the payment, and this
//! handler asks the provider until it has taken it. When the answer is lost, the provider is asked twice; the
//! idempotency key, which is the same for every attempt of a message, lets it see that.

use std::time::Duration;

use millstream_guest::{Context, Outcome, config, http, info};
use serde::{Deserialize, Serialize};

/// How long a provider is waited for. Well below the group's timeout, so that the reason of a failure is the provider.
const PATIENCE: Duration = Duration::from_secs(10);

/// The payload.
#[derive(Deserialize)]
struct EmailRequested {
    to: String,
    template: String,
}

/// What the provider takes.
#[derive(Serialize)]
struct Email<'a> {
    from: &'a str,
    to: &'a str,
    template: &'a str,
}

#[millstream_guest::handler]
fn handle(email: EmailRequested, ctx: Context) -> Result<Outcome, Box<dyn std::error::Error + Send + Sync>> {
    let setting =
        |table, name| config::get(name).ok_or_else(|| format!("groups.{}.{table} has no `{name}`", ctx.group));
    let (url, sender) = (setting("config", "provider")?, setting("config", "sender")?);
    let api_key = setting("secrets", "API_KEY")?;
    let body = serde_json::to_vec(&Email { from: &sender, to: &email.to, template: &email.template })?;
    let answer = http::Request::new("POST", &url)
        .header("content-type", "application/json")
        .header("authorization", &format!("Bearer {api_key}"))
        .header("idempotency-key", &format!("{}-{}", ctx.stream, ctx.id))
        .body(body)
        .timeout(PATIENCE)
        .send()?; // no answer: the message is retried
    info!("the provider answered {} to attempt {}", answer.status, ctx.attempt);
    Ok(judge(&answer))
}

/// What a status says about the next attempt. A reason never quotes the answer, which may quote the e-mail.
fn judge(answer: &http::Response) -> Outcome {
    let reason = format!("the provider answered {}", answer.status);
    match answer.status {
        200..300 => Outcome::Done,
        429 | 503 => match answer.header("retry-after").and_then(|seconds| seconds.parse().ok()) {
            Some(seconds) => Outcome::retry_after(Duration::from_secs(seconds), reason),
            None => Outcome::retry(reason),
        },
        // Who we are is not known there, which people must mend; the e-mail itself may be fine.
        401 | 403 | 407 => Outcome::retry(reason),
        408 | 425 => Outcome::retry(reason),
        // The e-mail is not what the provider takes, and will not be the next time.
        400..500 => Outcome::reject(reason),
        _ => Outcome::retry(reason),
    }
}

#[cfg(test)]
mod tests {
    use millstream_guest::{
        http::{Error, Response},
        testing::{TestMessage, deliver},
    };

    use super::*;

    fn requested() -> TestMessage {
        TestMessage::text(r#"{"to": "jamie@example.com", "template": "payment-received"}"#)
            .config("provider", "https://mail.example/send")
            .config("sender", "shop@example.com")
            .config("API_KEY", "k-1")
    }

    fn check(status: u16, headers: &[(&str, &str)], expected: Outcome) {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect();
        let answer = Response { status, headers, ..Response::default() };
        let delivered = deliver(handle, requested().answer_http(move |_| Ok(answer.clone())));
        assert_eq!(delivered.outcome, expected, "{status}");
    }

    #[test]
    fn the_provider_is_asked_with_what_it_needs() {
        let delivered = deliver(handle, requested().attempt(3).answer_http(|_| Ok(Response::new(202))));
        assert_eq!(delivered.outcome, Outcome::Done);
        let request = &delivered.called[0];
        assert_eq!((request.method.as_str(), request.url.as_str()), ("POST", "https://mail.example/send"));
        let header = |name: &str| request.headers.iter().find(|(found, _)| found == name).map(|(_, value)| &**value);
        assert_eq!((header("authorization"), header("idempotency-key")), (Some("Bearer k-1"), Some("test-1")));
        let body: serde_json::Value = serde_json::from_slice(&request.body).expect("JSON");
        assert_eq!((&body["from"], &body["to"]), (&"shop@example.com".into(), &"jamie@example.com".into()));
    }

    #[test]
    fn an_answer_decides_about_the_next_attempt() {
        check(200, &[], Outcome::Done);
        check(500, &[], Outcome::retry("the provider answered 500"));
        check(401, &[], Outcome::retry("the provider answered 401"));
        check(302, &[], Outcome::retry("the provider answered 302"));
        check(422, &[], Outcome::reject("the provider answered 422"));
        let minute = Duration::from_secs(60);
        check(429, &[("retry-after", "60")], Outcome::retry_after(minute, "the provider answered 429"));
        check(503, &[("retry-after", "soon")], Outcome::retry("the provider answered 503"));
    }

    #[test]
    fn what_fails_is_retried_and_tells_nothing_of_the_email() {
        let denied = Outcome::retry(Error::Denied { to: "mail.example:443".into() }.to_string());
        let delivered = deliver(handle, requested());
        assert_eq!(delivered.outcome, denied);
        let Outcome::Retry { reason } = delivered.outcome else { panic!("it is a retry") };
        assert!(!reason.contains("jamie") && !reason.contains("k-1"), "{reason}");
        let without = TestMessage::text(r#"{"to": "a@example.com", "template": "t"}"#);
        assert_eq!(deliver(handle, without).outcome, Outcome::retry("groups.test.config has no `provider`"));
    }
}
