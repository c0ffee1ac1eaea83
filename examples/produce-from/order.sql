-- The order and its message are one COMMIT: `psql "$DATABASE_URL" -v order_id=o-1 -f order.sql`.
-- Run twice with the same order it changes nothing: the business key makes the insert do nothing, and the idempotency
-- key makes the produce answer the first message with `duplicate`.
\set ON_ERROR_STOP on

begin;

create table if not exists orders (id text primary key, total_cents bigint not null);
insert into orders (id, total_cents) values (:'order_id', 1205) on conflict (id) do nothing;

select id, duplicate
from millstream.produce('orders', jsonb_build_object('order_id', :'order_id', 'total_cents', 1205),
    key => :'order_id', concurrency => 'ordered', idempotency_key => 'order-' || :'order_id');

commit;
