"""The ledger: which batches a database has, written in the transaction that brings them."""

from __future__ import annotations

import datetime
from typing import Any

from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.sql.types import sqlalchemy


def table(name: str, schema: str | None) -> Any:
    """Its definition: one row a batch."""
    sa = sqlalchemy()
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("gid", sa.String(64), primary_key=True),
        sa.Column("application_id", sa.String(200), nullable=False),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("written_at", sa.DateTime, nullable=False),
        schema=schema,
    )


def has(connection: Any, ledger: Any, gid: str) -> bool:
    """Whether the batch is committed."""
    sa = sqlalchemy()
    found = connection.execute(sa.select(ledger.c.gid).where(ledger.c.gid == gid)).first()
    return found is not None


def add(connection: Any, ledger: Any, gid: str, txn: SinkTxn, rows: int) -> None:
    """Raises: SQLAlchemy's ``IntegrityError``: it is there."""
    connection.execute(
        ledger.insert(),
        {
            "gid": gid,
            "application_id": txn.application_id,
            "batch_id": txn.batch_id,
            "row_count": rows,
            "written_at": now(),
        },
    )


def prune(connection: Any, ledger: Any, prefix: str, before: datetime.datetime) -> None:
    """Forgets batches older than anybody would ask for."""
    connection.execute(
        ledger.delete().where(ledger.c.gid.like(f"{prefix}\\_%", escape="\\"), ledger.c.written_at < before)
    )


def now() -> datetime.datetime:
    """UTC, without zone: not every database has zones."""
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
