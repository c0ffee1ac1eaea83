//! Renders the `.sql` files: puts the schema and a stream's id where they say so. Nothing else builds SQL.

use sqlx::AssertSqlSafe;

/// The schema that holds every table, quoted once.
#[derive(Clone, Debug)]
pub struct Schema {
    name: String,
    quoted: String,
    /// First number of every advisory lock of this schema, so that two schemas of one database do not wait for each
    /// other. A collision costs waiting, never correctness.
    lock_class: i32,
}

impl Schema {
    /// Any name: it is quoted here and nowhere else.
    pub fn new(name: &str) -> Self {
        let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        // The low bits are left free for the kinds of lock in `0001_*.sql`.
        let quoted = format!("\"{}\"", name.replace('"', "\"\""));
        Self { name: name.to_owned(), quoted, lock_class: (hash & 0x7fff_fff0) as i32 }
    }

    /// The name as it stands in the catalog; for parameters, never for SQL text.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The quoted name.
    pub fn quoted(&self) -> &str {
        &self.quoted
    }

    /// The notification channel of this schema.
    pub fn channel(&self) -> String {
        format!("millstream_{:x}", self.lock_class)
    }

    /// A statement that reads or writes only shared tables. It may name `{schema}` (`{schema_text}` inside a string,
    /// `{schema_format}` inside one for format()) and `{lock_class}`.
    pub fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(self.render(text))
    }

    /// A statement about one stream. It may name `{stream_id}` as well.
    pub fn stream_sql(&self, text: &str, stream_id: i32) -> AssertSqlSafe<String> {
        AssertSqlSafe(self.render(text).replace("{stream_id}", &stream_id.to_string()))
    }

    fn render(&self, text: &str) -> String {
        // Where the quoted name stands inside a string, or inside one that goes through format().
        let text_quoted = self.quoted.replace('\'', "''");
        text.replace("{schema}", &self.quoted)
            .replace("{schema_format}", &text_quoted.replace('%', "%%"))
            .replace("{schema_text}", &text_quoted)
            .replace("{lock_class}", &self.lock_class.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_in_a_schema_name_are_doubled() {
        assert_eq!(Schema::new(r#"we"ird; --"#).sql("select {schema}.x").0, r#"select "we""ird; --".x"#);
    }
}
