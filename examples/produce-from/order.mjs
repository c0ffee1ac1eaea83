// The order and its message are one COMMIT, with node-postgres: DATABASE_URL=... node order.mjs o-1
// Run twice with the same order it changes nothing. An error before COMMIT rolls both back.
import pg from "pg";

/** Answers the message's id, and whether it had been produced before. */
async function placeOrder(client, orderId, totalCents) {
  await client.query("begin");
  try {
    await client.query("create table if not exists orders (id text primary key, total_cents bigint not null)");
    await client.query("insert into orders (id, total_cents) values ($1, $2) on conflict (id) do nothing", [
      orderId,
      totalCents,
    ]);
    const message = JSON.stringify({ order_id: orderId, total_cents: totalCents });
    const { rows } = await client.query(
      "select id, duplicate from millstream.produce('orders', $1::jsonb, key => $2, concurrency => 'ordered', idempotency_key => $3)",
      [message, orderId, `order-${orderId}`],
    );
    await client.query("commit");
    return rows[0];
  } catch (error) {
    await client.query("rollback");
    throw error;
  }
}

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
try {
  const { id, duplicate } = await placeOrder(client, process.argv[2], 1205);
  console.log(id, duplicate ? "duplicate" : "produced");
} finally {
  await client.end();
}
