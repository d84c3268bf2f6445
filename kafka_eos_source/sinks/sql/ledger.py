"""The ledger: a table that records committed batches, in the same database transaction as their rows.

The sink believes it, so whoever may write to it can pretend that a batch is committed.
"""

from __future__ import annotations

import datetime
from typing import Any

from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.sql.types import sqlalchemy


def table(name: str, schema: str | None) -> Any:
    """Defines the ledger, which has one row for each batch of each sink."""
    sa = sqlalchemy()
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("gid", sa.String(64), primary_key=True),
        sa.Column("application_id", sa.String(200), nullable=False),
        sa.Column("cluster", sa.String(12), nullable=False),
        sa.Column("sink", sa.String(32), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("written_at", sa.DateTime, nullable=False),
        schema=schema,
    )


def has(connection: Any, ledger: Any, gid: str, *, locking: bool = False) -> bool:
    """Returns whether the ledger contains the batch, that is, whether it is committed.

    Args:
        connection: SQLAlchemy connection.
        ledger: result of `table`.
        gid: id of the batch in the database; see `names.gid`.
        locking: whether to wait for a transaction that is committing the row or rolling it back.

    Raises:
        sqlalchemy.exc.OperationalError: if the wait exceeds the lock timeout.
    """
    wanted = sqlalchemy().select(ledger.c.gid).where(ledger.c.gid == gid)
    return connection.execute(wanted.with_for_update(read=True) if locking else wanted).first() is not None


def add(connection: Any, ledger: Any, gid: str, txn: SinkTxn, rows: int) -> None:
    """Adds the batch to the ledger.

    Raises:
        sqlalchemy.exc.IntegrityError: if the ledger already contains the batch.
    """
    connection.execute(
        ledger.insert(),
        {
            "gid": gid,
            "application_id": txn.application_id,
            "cluster": txn.cluster,
            "sink": txn.sink,
            "sequence": txn.sequence,
            "row_count": rows,
            "written_at": now(),
        },
    )


def prune(connection: Any, ledger: Any, prefix: str, before: datetime.datetime) -> None:
    """Deletes batches that were written before a time, and that no driver asks for any more."""
    connection.execute(
        ledger.delete().where(ledger.c.gid.like(f"{prefix}\\_%", escape="\\"), ledger.c.written_at < before)
    )


def now() -> datetime.datetime:
    """Returns the time in UTC without a time zone, because not every database supports time zones."""
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
