//! The behaviour tests: one program, so that wasmtime is linked once; one file for each behaviour.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

mod tidy;

mod config;

mod cli;

mod cli_apply;

mod cli_bench;

mod cli_dead;

mod cli_doctor;

mod cli_forget;

mod cli_groups;

mod cli_hot_keys;

mod cli_keys;

mod cli_names;

mod cli_produce;

mod cli_seek;

mod cli_tail;

mod cli_why;

mod database;

mod embedded_postgres;

mod program;

mod up;

mod up_hosts;

mod up_database;

mod up_faults;

mod up_memory;

mod up_reload;

mod up_settings;

mod up_verbs;

mod up_secrets;

mod no_leaks;

mod relay_email;

mod settles;

mod side_effects;

mod consume;

mod crashes;

mod client;

mod client_commit;

mod client_errors;

mod maintenance;

mod retention;

mod sandbox;

mod sandbox_http;

mod sandbox_load;

mod sandbox_output;

mod golden;

mod deploy;

mod produce;

mod produce_from;

mod invariants;

mod open_transaction;

mod frozen;
mod gap_rule;

mod extending;

mod recovery;

mod retries;

mod drain;

mod filters;

mod seek;

mod seek_hosts;

mod seek_key;
mod seek_key_dead;
mod seek_key_meanwhile;

mod payloads;

mod idle;

mod guest_sql;

mod guest_sql_attacks;

mod guest_sql_values;

mod ledger;

mod lost_replies;

mod keys;

mod keys_alike;

mod keys_compaction;

mod keys_cost;

mod keys_dead;

mod keys_deep;

mod keys_produce;

mod keys_hosts;

mod keys_races;

mod keys_retention;

mod keys_stuck;

mod keys_ways;

mod redrive;

mod late_groups;

mod backlog;

mod model;
