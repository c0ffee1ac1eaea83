# What one types here. `make` alone prints this list; `make up` is the one to start with.

TARGET := $(or $(CARGO_TARGET_DIR),target)
PROGRAM := $(TARGET)/release/millstream
CARGO := cargo
.DEFAULT_GOAL := help

.PHONY: help
help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: setup
setup: ## install what is missing: Postgres server programs, the wasm target
	@command -v $(CARGO) >/dev/null || { echo "setup: install Rust first: https://rustup.rs" >&2; exit 1; }
	@host/setup-postgres.sh
	@guest-sdk/setup-wasm.sh

.PHONY: handlers
handlers: setup ## build every example into handlers/
	@test -d handlers || echo "building the example handlers; the first time takes minutes"
	@guest-sdk/build-handlers.sh handlers

.PHONY: up
up: handlers ## run it: its own Postgres, the example handlers, live traffic; ctrl-C stops everything
	@$(CARGO) build --release --locked
	@exec $(PROGRAM) up --demo

.PHONY: test
test: handlers ## everything that must hold before a commit: format, lints, all tests
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --quiet --locked --all-targets -- -D warnings
	@host/check-client.sh
	@cd guest-sdk && $(CARGO) fmt --all --check && $(CARGO) test --quiet --locked
	@cd examples && $(CARGO) fmt --all --check && $(CARGO) test --quiet --locked
	@$(CARGO) test --quiet --locked

.PHONY: soak
soak: handlers ## the same behaviour for longer and under worse conditions; takes an hour
	@MILLSTREAM_SOAK=1 $(CARGO) test --release --locked --test behaviour -- --test-threads=1

.PHONY: bench
bench: handlers ## speeds, each as a ratio to the floor measured in the same run
	@$(CARGO) build --quiet --release --locked
	@$(PROGRAM) bench
