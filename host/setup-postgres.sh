#!/bin/sh
# Finds the Postgres server programs that millstream runs by itself, or installs them. Changes nothing if they are there.
# The same places as host/src/database/embedded/binaries.rs.
set -eu

oldest=14

# Says yes for a folder with a server that is new enough.
fits() {
    [ -x "$1/initdb" ] && [ -x "$1/postgres" ] || return 1
    major=$("$1/postgres" --version | sed -n 's/.*(PostgreSQL) \([0-9]*\).*/\1/p')
    [ "${major:-0}" -ge "$oldest" ]
}

found() {
    command=$(command -v postgres || true)
    for folder in "${command%/*}" "$(pg_config --bindir 2>/dev/null || true)" \
        /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
        /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin /home/linuxbrew/.linuxbrew/opt/postgresql@*/bin \
        /Applications/Postgres.app/Contents/Versions/*/bin; do
        if fits "$folder"; then return 0; fi
    done
    return 1
}

# Runs as root: directly, or through sudo.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else echo "setup: run as root: $*" >&2; return 1; fi
}

install() {
    if command -v apt-get >/dev/null; then
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql
    elif command -v dnf >/dev/null; then as_root dnf install -y -q postgresql-server
    elif command -v pacman >/dev/null; then as_root pacman -S --noconfirm --needed postgresql
    elif command -v apk >/dev/null; then as_root apk add --quiet postgresql
    elif command -v brew >/dev/null; then brew install --quiet postgresql@17
    else
        echo "setup: install the PostgreSQL server, version $oldest or newer, with your package manager" >&2
        return 1
    fi
}

if ! found; then
    echo "setup: installing the PostgreSQL server"
    # Its messages matter only when it fails.
    log=$(mktemp)
    install >"$log" 2>&1 </dev/null || { cat "$log" >&2; exit 1; }
    rm -f "$log"
    found || { echo "setup: the installed PostgreSQL is older than $oldest; install a newer one" >&2; exit 1; }
fi
