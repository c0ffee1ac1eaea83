//! What the bytes of a handler file are, told from their outside: a component, a core module, something else, or only
//! the start of one. Understands sections, never what is in them.

/// What a file turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Component,
    /// A core module that carries WIT metadata, as our SDK makes it.
    ModuleWithMetadata,
    ModuleWithout,
    /// It ends in the middle of a section.
    Truncated,
    /// Wasm of a version that is neither.
    UnknownVersion,
    Text,
    /// Compiled by a wasmtime, for one machine.
    Precompiled,
    Empty,
    Other,
}

const MAGIC: &[u8] = b"\0asm";
const MODULE: [u8; 4] = [1, 0, 0, 0];
const COMPONENT: [u8; 4] = [13, 0, 1, 0];

/// Tells the form from the first bytes and the section headers.
pub fn form(bytes: &[u8]) -> Form {
    if bytes.is_empty() {
        return Form::Empty;
    }
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        return form_of_other(bytes);
    };
    let Some((version, sections)) = rest.split_first_chunk::<4>() else {
        return Form::Truncated;
    };
    match *version {
        MODULE => match has_metadata(sections) {
            Some(true) => Form::ModuleWithMetadata,
            Some(false) => Form::ModuleWithout,
            None => Form::Truncated,
        },
        COMPONENT => {
            if Sections(sections).all(|section| section.is_ok()) {
                Form::Component
            } else {
                Form::Truncated
            }
        }
        _ => Form::UnknownVersion,
    }
}

/// Whether the bytes are a whole wasm file, as far as its sections tell. A file that is still being written is not.
pub fn is_whole(bytes: &[u8]) -> bool {
    !matches!(form(bytes), Form::Truncated | Form::Empty)
}

fn form_of_other(bytes: &[u8]) -> Form {
    if MAGIC.starts_with(bytes) {
        return Form::Truncated;
    }
    if wasmtime::Engine::detect_precompiled(bytes).is_some() {
        return Form::Precompiled;
    }
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(4096)]);
    let code = start.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with(";;"));
    let is_text = code.is_some_and(|code| {
        let word = code.strip_prefix('(').map(str::trim_start);
        word.is_some_and(|word| word.starts_with("module") || word.starts_with("component") || word.starts_with(';'))
    });
    if is_text { Form::Text } else { Form::Other }
}

/// Whether a `component-type` section is among them; `None` when they are not whole.
fn has_metadata(sections: &[u8]) -> Option<bool> {
    let mut found = false;
    for section in Sections(sections) {
        let (id, content) = section.ok()?;
        // A custom section starts with the length and the text of its name.
        if id == 0
            && let Some((length, name)) = leb128(content)
        {
            found |= name.get(..length).is_some_and(|name| name.starts_with(b"component-type"));
        }
    }
    Some(found)
}

/// The sections of a module or component: an id, a length, content. An `Err` ends a file that is cut off.
struct Sections<'a>(&'a [u8]);

struct CutOff;

impl<'a> Iterator for Sections<'a> {
    type Item = Result<(u8, &'a [u8]), CutOff>;

    fn next(&mut self) -> Option<Self::Item> {
        let (&id, rest) = self.0.split_first()?;
        let section = leb128(rest).and_then(|(length, rest)| rest.split_at_checked(length));
        let Some((content, rest)) = section else {
            self.0 = &[];
            return Some(Err(CutOff));
        };
        self.0 = rest;
        Some(Ok((id, content)))
    }
}

/// An unsigned number of at most 32 bits, and what follows it.
fn leb128(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut value = 0_u64;
    for (index, &byte) in bytes.iter().take(5).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((usize::try_from(value).ok()?, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(text: &str) -> Vec<u8> {
        wat::parse_str(text).expect("valid WAT")
    }

    #[test]
    fn every_form_is_recognised() {
        let plain = module("(module (func (export \"f\")))");
        let with_metadata = module("(module (@custom \"component-type:x\" \"..\"))");
        let mut unknown_version = plain.clone();
        unknown_version[4] = 9;
        let cases: &[(&[u8], Form)] = &[
            (b"", Form::Empty),
            (b"\0as", Form::Truncated),
            (b"\0asm\x01\0", Form::Truncated),
            (&plain, Form::ModuleWithout),
            (&with_metadata, Form::ModuleWithMetadata),
            (&module("(component)"), Form::Component),
            (&unknown_version, Form::UnknownVersion),
            (b"  ;; a comment\n (module)", Form::Text),
            (b"(; block ;) (module)", Form::Text),
            (b"#!/bin/sh\n", Form::Other),
            (b"\xff\xfe\0", Form::Other),
        ];
        for (bytes, expected) in cases {
            assert_eq!(form(bytes), *expected, "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn a_file_cut_inside_a_section_is_never_whole() {
        let whole = module("(module (func (export \"f\")) (memory 1) (data (i32.const 0) \"hello\"))");
        let boundaries: Vec<usize> = {
            let mut rest = Sections(&whole[8..]);
            let mut ends = vec![8];
            while rest.next().is_some() {
                ends.push(whole.len() - rest.0.len());
            }
            ends
        };
        for length in 0..whole.len() {
            assert_eq!(is_whole(&whole[..length]), boundaries.contains(&length), "{length} of {}", whole.len());
        }
    }
}
