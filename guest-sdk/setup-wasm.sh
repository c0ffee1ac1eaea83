#!/bin/sh
# Finds or installs what builds Rust to wasm. Nothing is installed twice.
#
#   1. rustup's targets, where rustup is: wasm32-unknown-unknown and wasm32-wasip2.
#   2. Else Debian's or Ubuntu's packages, as root or through sudo: a compiler with the source of its standard library, the
#      linker, and the C library for WASI.
#   3. Else a line that says what to do.
set -eu

targets="wasm32-unknown-unknown wasm32-wasip2"
packages="rustc-web cargo-web rust-web-src lld wasi-libc"

say() {
    echo "setup-wasm: $*"
}

# The same questions that build-handlers.sh asks before it builds.
has_targets() {
    command -v rustc >/dev/null || return 1
    libraries=$(rustc --print sysroot)/lib/rustlib
    for target in $targets; do
        [ -d "$libraries/$target/lib" ] || return 1
    done
}

has_debian_toolchain() {
    [ -x /usr/bin/rustc ] && [ -x /usr/bin/cargo ] && [ -x /usr/bin/wasm-ld ] && [ -f /usr/lib/wasm32-wasi/libc.a ] &&
        [ -d "$(/usr/bin/rustc --print sysroot)/lib/rustlib/src/rust/library/std" ]
}

# Without a network rustup tries for minutes: a bound, where there is a `timeout`, lets us go on to the packages.
add_targets() {
    command -v rustup >/dev/null || return 1
    bound=
    command -v timeout >/dev/null && bound="timeout 60"
    # Both lists are split on purpose.
    # shellcheck disable=SC2086
    RUSTUP_MAX_RETRIES=1 $bound rustup target add $targets >/dev/null 2>&1 && has_targets
}

install_packages() {
    command -v apt-get >/dev/null || return 1
    as_root=
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || return 1
        as_root=sudo
    fi
    # shellcheck disable=SC2086
    $as_root apt-get install -y --no-install-recommends $packages ||
        { $as_root apt-get update && $as_root apt-get install -y --no-install-recommends $packages; } || return 1
    has_debian_toolchain
}

if has_targets; then
    say "rustup's wasm targets are installed"
elif has_debian_toolchain; then
    say "Debian's wasm toolchain is installed"
elif add_targets; then
    say "added rustup's targets $targets"
elif install_packages; then
    say "installed Debian's packages $packages"
else
    {
        say "there is no toolchain for wasm, and it could not be installed. One of these does it:"
        say "  rustup target add $targets"
        say "  sudo apt-get install $packages"
    } >&2
    exit 1
fi
