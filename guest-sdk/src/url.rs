//! Takes a URL apart, as far as a request needs it. Percent-encodes nothing: a URL that is not whole is an error.

use crate::http::Error;

/// Where a URL leads.
pub(crate) struct Target<'a> {
    pub(crate) is_https: bool,
    /// Host, and port where there is one.
    pub(crate) authority: &'a str,
    /// What is asked for there, with its leading slash.
    pub(crate) path: String,
}

impl<'a> Target<'a> {
    pub(crate) fn parse(url: &'a str) -> Result<Self, Error> {
        let invalid = |reason: &str| Error::Invalid { reason: reason.to_owned() };
        let (is_https, rest) = match (without_prefix(url, "https://"), without_prefix(url, "http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(invalid("its URL begins with neither http:// nor https://")),
        };
        // What follows `#` is for whoever asks, and is never sent.
        let rest = rest.split_once('#').map_or(rest, |(sent, _)| sent);
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        if authority.is_empty() {
            return Err(invalid("its URL names no host"));
        }
        if authority.contains('@') {
            return Err(invalid("its URL holds a user or a password: send an authorization header"));
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let target = Self { is_https, authority, path };
        if !target.path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid("its URL holds blanks or other characters that must be percent-encoded"));
        }
        Ok(target)
    }

    /// Host and port.
    pub(crate) fn to(&self) -> String {
        let has_port = self.authority.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
        match (has_port, self.is_https) {
            (true, _) => self.authority.to_owned(),
            (false, true) => format!("{}:443", self.authority),
            (false, false) => format!("{}:80", self.authority),
        }
    }
}

/// The rest of `text` after `prefix`, in any case.
fn without_prefix<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (start, rest) = text.split_at_checked(prefix.len())?;
    start.eq_ignore_ascii_case(prefix).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(url: &str, expected: Option<(&str, &str)>) {
        let target = Target::parse(url);
        let found = target.as_ref().ok().map(|target| (target.to(), target.path.clone()));
        assert_eq!(found, expected.map(|(to, path)| (to.to_owned(), path.to_owned())), "{url}");
    }

    #[test]
    fn a_url_is_taken_apart() {
        check("https://mail.example/send?a=b#c", Some(("mail.example:443", "/send?a=b")));
        check("HTTP://mail.example", Some(("mail.example:80", "/")));
        check("http://mail.example?a=/b", Some(("mail.example:80", "/?a=/b")));
        check("http://[::1]/", Some(("[::1]:80", "/")));
        check("http://[::1]:8080/", Some(("[::1]:8080", "/")));
        check("http:///send", None);
        check("http://user:hunter2@mail.example/", None);
        check("http://mail.example/a b", None);
        check("mail.example/send", None);
        check("é", None);
    }
}
