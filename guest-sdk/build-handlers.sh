#!/bin/sh
# Builds message handlers to wasm, with rustup's targets where they are installed and with Debian's toolchain elsewhere.
#
#   build-handlers.sh [OUTDIR]             every folder of examples/ to OUTDIR/NAME.wasm (OUTDIR: handlers)
#   build-handlers.sh --dir PATH OUT.wasm  the one handler in PATH to OUT.wasm
#
# MILLSTREAM_WASM_TARGET_DIR: where cargo builds (examples/target, or PATH/target).
#
# A file that did not change is not touched, so a host that watches OUTDIR does not reload it. A file that did is replaced by
# a rename, so a host never reads half of it.
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)

fail() {
    echo "build-handlers: $*" >&2
    exit 1
}

# The target a handler is built for. One with `wasi = true` under [package.metadata.millstream] needs WASI.
wants_wasi() {
    grep -q '^wasi = true' "$1/Cargo.toml"
}

# Whether the toolchain on PATH has the standard library for a target.
has_target() {
    [ -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ]
}

# Debian's compiler brings no wasm libraries, only their source: cargo builds them too, which needs RUSTC_BOOTSTRAP.
has_debian_toolchain() {
    [ -x /usr/bin/cargo ] && [ -x /usr/bin/wasm-ld ] && [ -f /usr/lib/wasm32-wasi/libc.a ] &&
        [ -d "$(/usr/bin/rustc --print sysroot)/lib/rustlib/src/rust/library/std" ]
}

# build TARGET FOLDER PACKAGE...: builds packages of one workspace for one target.
build() {
    target=$1 folder=$2
    shift 2
    for package; do
        set -- "$@" -p "$package"
        shift
    done
    set -- build --release --quiet --target "$target" "$@"
    if has_target "$target"; then
        (cd "$folder" && cargo "$@")
    elif ! has_debian_toolchain; then
        fail "there is no toolchain for $target; run \`make setup\` (it adds rustup's targets, or Debian's packages)"
    else
        (
            cd "$folder"
            export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
            export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=/usr/bin/wasm-ld CARGO_TARGET_WASM32_WASIP1_LINKER=/usr/bin/wasm-ld
            # Debian's C library for WASI lies outside of the compiler's own folders.
            export CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-Clink-self-contained=no -Clink-arg=-L/usr/lib/wasm32-wasi -L/usr/lib/wasm32-wasi"
            /usr/bin/cargo "$@" -Zbuild-std=std,panic_abort
        )
    fi
}

# install FROM TO: replaces TO by a rename, if it differs.
install() {
    cmp -s "$1" "$2" && return
    mkdir -p "$(dirname "$2")"
    # The leading dot and the suffix keep a host that watches the folder from taking it for a handler.
    part=$(dirname "$2")/.$(basename "$2").$$.part
    cp "$1" "$part"
    mv "$part" "$2"
    echo "built $2 ($(wc -c <"$2" | tr -d ' ') bytes)"
}

# package_name FOLDER: the name in its Cargo.toml.
package_name() {
    sed -n 's/^name = "\(.*\)"$/\1/p' "$1/Cargo.toml" | head -n 1
}

# artefact TARGET PACKAGE: where cargo puts it.
artefact() {
    echo "$CARGO_TARGET_DIR/$1/release/$(echo "$2" | tr - _).wasm"
}

command -v cargo >/dev/null || fail "cargo is not on PATH; install Rust from https://rustup.rs"
plain=wasm32-unknown-unknown
wasi=wasm32-wasip2
has_target "$wasi" || wasi=wasm32-wasip1

if [ "${1-}" = --dir ]; then
    [ $# -eq 3 ] || fail "usage: build-handlers.sh --dir PATH OUT.wasm"
    folder=$(CDPATH= cd -- "$2" && pwd) || fail "there is no folder $2"
    [ -f "$folder/Cargo.toml" ] || fail "there is no Cargo.toml in $2"
    export CARGO_TARGET_DIR="${MILLSTREAM_WASM_TARGET_DIR:-$folder/target}"
    target=$plain
    wants_wasi "$folder" && target=$wasi
    name=$(package_name "$folder")
    build "$target" "$folder" "$name"
    install "$(artefact "$target" "$name")" "$3"
    exit
fi

out=${1:-$root/handlers}
export CARGO_TARGET_DIR="${MILLSTREAM_WASM_TARGET_DIR:-$root/examples/target}"
plain_packages= wasi_packages=
for manifest in "$root"/examples/*/Cargo.toml; do
    folder=$(dirname "$manifest")
    name=$(basename "$folder")
    if wants_wasi "$folder"; then wasi_packages="$wasi_packages $name"; else plain_packages="$plain_packages $name"; fi
done
# Package names hold no spaces; the lists are split on purpose.
# shellcheck disable=SC2086
[ -z "$plain_packages" ] || build "$plain" "$root/examples" $plain_packages
# shellcheck disable=SC2086
[ -z "$wasi_packages" ] || build "$wasi" "$root/examples" $wasi_packages
for name in $plain_packages; do install "$(artefact "$plain" "$name")" "$out/$name.wasm"; done
for name in $wasi_packages; do install "$(artefact "$wasi" "$name")" "$out/$name.wasm"; done
