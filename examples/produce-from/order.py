"""The order and its message are one COMMIT, with psycopg 3: DATABASE_URL=... python3 order.py o-1

Run twice with the same order it changes nothing. An error inside the block rolls both back.
"""

import os
import sys

import psycopg
from psycopg.types.json import Jsonb


def place_order(connection: psycopg.Connection, order_id: str, total_cents: int) -> tuple[int, bool]:
    """Answers the message's id, and whether it had been produced before."""
    with connection.transaction():
        connection.execute("create table if not exists orders (id text primary key, total_cents bigint not null)")
        connection.execute(
            "insert into orders (id, total_cents) values (%s, %s) on conflict (id) do nothing", (order_id, total_cents)
        )
        message = Jsonb({"order_id": order_id, "total_cents": total_cents})
        return connection.execute(
            "select id, duplicate from millstream.produce(%s, %s, key => %s, concurrency => 'ordered', idempotency_key => %s)",
            ("orders", message, order_id, f"order-{order_id}"),
        ).fetchone()


if __name__ == "__main__":
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        message_id, duplicate = place_order(connection, sys.argv[1], 1205)
        print(message_id, "duplicate" if duplicate else "produced")
