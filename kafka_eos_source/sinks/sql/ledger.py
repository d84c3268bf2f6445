"""The ledger: which batches a database has, written in the transaction that brings them."""

from __future__ import annotations

import datetime
from typing import Any

from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.sql.types import sqlalchemy


def table(name: str, schema: str | None) -> Any:
    """Its definition: one row for each batch of each sink."""
    sa = sqlalchemy()
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("gid", sa.String(64), primary_key=True),
        sa.Column("application_id", sa.String(200), nullable=False),
        sa.Column("sink", sa.String(32), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("written_at", sa.DateTime, nullable=False),
        schema=schema,
    )


def as_found(connection: Any, defined: Any) -> Any:
    """The ledger as the database has it: one that an older version made has the column ``batch_id`` instead.

    Args:
        connection: SQLAlchemy's.
        defined: by `table`.
    """
    sa = sqlalchemy()
    columns = {each["name"] for each in sa.inspect(connection).get_columns(defined.name, defined.schema)}
    if "sequence" in columns:
        return defined
    kept = [each for each in defined.columns if each.name not in ("sink", "sequence")]
    return sa.Table(
        defined.name,
        sa.MetaData(),
        *(sa.Column(each.name, each.type, primary_key=each.primary_key) for each in kept),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        schema=defined.schema,
    )


def has(connection: Any, ledger: Any, gid: str, *, locking: bool = False) -> bool:
    """Whether the batch is committed.

    Args:
        connection: SQLAlchemy's.
        ledger: by `as_found`.
        gid: of the batch.
        locking: wait for a transaction that is about to commit the row, or to take it back.

    Raises:
        sqlalchemy.exc.OperationalError: it was waited for too long.
    """
    wanted = sqlalchemy().select(ledger.c.gid).where(ledger.c.gid == gid)
    return connection.execute(wanted.with_for_update(read=True) if locking else wanted).first() is not None


def add(connection: Any, ledger: Any, gid: str, context: SinkContext, txn: SinkTxn, rows: int) -> None:
    """Adds the batch. In an old ledger the sink's name is only in the gid, and ``batch_id`` has the sequence.

    Raises:
        sqlalchemy.exc.IntegrityError: it is there already.
    """
    known = {
        "gid": gid,
        "application_id": txn.application_id,
        "sink": context.name,
        "sequence": txn.sequence,
        "batch_id": txn.sequence,
        "row_count": rows,
        "written_at": now(),
    }
    connection.execute(ledger.insert(), {name: known[name] for name in ledger.columns.keys()})  # noqa: SIM118


def prune(connection: Any, ledger: Any, prefix: str, before: datetime.datetime) -> None:
    """Forgets batches older than anybody would ask for."""
    connection.execute(
        ledger.delete().where(ledger.c.gid.like(f"{prefix}\\_%", escape="\\"), ledger.c.written_at < before)
    )


def now() -> datetime.datetime:
    """UTC, without zone: not every database has zones."""
    return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
