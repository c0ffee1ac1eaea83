#!/usr/bin/env bash
# The client alone: it builds without warnings, and nothing of the sandbox, the command line or the handlers folder comes
# with it. `make test` runs it; seconds when warm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

cargo="${CARGO:-cargo}"
alone=(--no-default-features --features client --locked)

tree="$("$cargo" tree --quiet "${alone[@]}" --edges normal --prefix none --format '{p}')"
# A tree that cannot be read would hold nothing forbidden either.
grep -q '^sqlx v' <<<"$tree" || { echo "check-client: cargo tree does not show sqlx: $tree" >&2; exit 1; }
if foreign="$(grep -E '^(wasmtime|wasi|wit-|wasmparser|cranelift|notify|clap|indicatif|toml|rustix|tracing-subscriber)[^ ]* v' <<<"$tree")"; then
    echo "check-client: the feature \`client\` brings what only the host may need:" >&2
    sort -u <<<"$foreign" >&2
    exit 1
fi
"$cargo" clippy --quiet "${alone[@]}" -- -D warnings
