//! The `#[handler]` attribute: leaves the function as it is and, for wasm, exports it to the host.
//!
//! It knows nothing of messages or outcomes; those are traits of `millstream-guest`, so the compiler checks them.

use proc_macro::TokenStream;
use quote::{quote, quote_spanned};
use syn::{ItemFn, spanned::Spanned};

/// Makes a function the handler of this component.
///
/// The function takes a `Message`, or a type that serde reads from the JSON payload and after it, if it wants, a
/// `Context`. It answers with an `Outcome`, with `()`, or with a `Result` of one of these. A crate has one handler.
///
/// The function itself stays as it was, so a unit test calls it natively.
///
/// ```
/// use millstream_guest::{Message, Outcome};
///
/// #[millstream_guest::handler]
/// fn handle(message: Message) -> Outcome {
///     match message.payload {
///         Some(_) => Outcome::Done,
///         None => Outcome::reject("this stream has no tombstones"),
///     }
/// }
/// ```
///
/// The compiler refuses what is no handler:
///
/// ```compile_fail,E0277
/// #[millstream_guest::handler]
/// fn handle(payload: u32) -> bool {
///     payload > 0
/// }
/// ```
/// ```compile_fail
/// #[millstream_guest::handler]
/// async fn handle(payload: u32) {}
/// ```
#[proc_macro_attribute]
pub fn handler(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let function = match syn::parse::<ItemFn>(item) {
        Ok(function) => function,
        Err(error) => return error.to_compile_error().into(),
    };
    let refusal = refusal(&arguments.into(), &function).map(|error| error.to_compile_error());
    if let Some(refusal) = refusal {
        return quote! { #refusal #function }.into();
    }
    let name = &function.sig.ident;
    // The span of the function, so that a wrong argument or answer type is reported there.
    let export = quote_spanned! { function.sig.span() =>
        const _: () = {
            #[expect(dead_code, reason = "it is there to be compiled")]
            fn check() {
                ::millstream_guest::__private::check(#name)
            }
            ::millstream_guest::__private::export!(#name);
        };
    };
    quote! { #function #export }.into()
}

/// What a handler cannot be; everything else the types decide.
fn refusal(arguments: &proc_macro2::TokenStream, function: &ItemFn) -> Option<syn::Error> {
    let signature = &function.sig;
    let reason = if !arguments.is_empty() {
        return Some(syn::Error::new_spanned(arguments, "`#[handler]` takes no arguments"));
    } else if signature.asyncness.is_some() {
        "a handler is called and answers: remove `async` (the host runs many instances side by side)"
    } else if !signature.generics.params.is_empty() {
        "a handler cannot be generic: name the type of its payload"
    } else if !(1..=2).contains(&signature.inputs.len()) {
        "a handler takes a `Message` or a payload type, and after it, if it wants, a `Context`"
    } else {
        return None;
    };
    Some(syn::Error::new_spanned(signature, reason))
}
