-- Holds what is held of stream $1 on the lanes that its rules add. Called by engine::declare after declare_key_rules.sql; see
-- functions/operate.sql.
select {schema}.hold_new_lanes($1)
