"""What a transactional id of ``transaction.version`` 2 needs after a person has lowered the feature to 0.

At level 0, coordinators of Kafka 4 write their state of a transactional id in a format without the version of
its transactions, and fail to write one of version 2. They then answer CONCURRENT_TRANSACTIONS to every
request for that id. So no request may ask for version 2 there, and InitProducerId must not find an id whose
last transaction had that version and has ended, because its new state inherits the version. AddOffsetsToTxn
sets version 0: it opens a transaction, which InitProducerId then aborts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from kafka.protocol.producer import AddOffsetsToTxnRequest, EndTxnRequest

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.failure import is_transient, kafka_error
from kafka_eos_source.kafka.wire.cluster import TemporaryError
from kafka_eos_source.kafka.wire.connection import Connection

FEATURE = "transaction.version"

#: A coordinator that is busy for so long, in seconds, although no transaction ends, is stuck. Otherwise it is
#: busy while it writes one record.
_STUCK_SECONDS = 10.0
#: States in which markers are being written, which may take long.
_ENDING = frozenset({"PrepareCommit", "PrepareAbort"})

_log = logging.getLogger(__name__)

Ask = Callable[[Connection, Any], Any]


def is_lowered(connection: Connection) -> bool:
    """Returns whether a broker that knows ``transaction.version`` 2 has level 0."""
    # brokers hide the features that they support from this version of ApiVersions if the lowest level is 0
    return not connection.features.get(FEATURE, 0) and connection.version(EndTxnRequest, 5) >= 5


class LoweredId:
    """A transactional id on a coordinator with the lowered feature.

    Args:
        transactional_id: the id. The application's group has the same name.
        ask: sends a request on a connection, and returns the answer.
    """

    def __init__(self, transactional_id: str, ask: Ask) -> None:
        self._id = transactional_id
        self._ask = ask
        self._is_prepared = False
        self._busy_since: float | None = None

    def prepare(self, connection: Connection) -> None:
        """Lets the coordinator forget the version of the last transaction, so that InitProducerId works.

        Raises:
            KafkaException: if the coordinator asks for patience.
            TemporaryError: if it does not answer.
        """
        found = None if self._is_prepared else self._described(connection)
        if found is None or found.transaction_state == "Ongoing":
            return
        request = AddOffsetsToTxnRequest(
            transactional_id=self._id,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            group_id=self._id,
            version=connection.version(AddOffsetsToTxnRequest, 3),
        )
        error = KafkaError(self._ask(connection, request).error_code)
        if error.code() and is_transient(error):
            raise KafkaException(error)
        self._is_prepared = True
        if error.code():  # the principal has another group, or another owner came first: try without
            _log.info("cannot prepare transactional id %r for version 0: %s", self._id, error.str())

    def check(self, connection: Connection, error: KafkaException) -> None:
        """Checks after an error whether the coordinator can ever end what it has begun.

        Raises:
            OperatorError: if not.
        """
        if kafka_error(error).code() != KafkaError.CONCURRENT_TRANSACTIONS:
            self._busy_since = None
            return
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if now - self._busy_since < _STUCK_SECONDS:
            return
        found = self._described(connection)
        if found is not None and found.transaction_state not in _ENDING:
            raise OperatorError(
                f"transaction.version was lowered to 0 after transactional id {self._id!r} had used level 2. "
                f"Its coordinator, broker {connection.address}, cannot write the state of the id any more, "
                "and answers CONCURRENT_TRANSACTIONS to every request for it.",
                fix="raise transaction.version to 1, which means the same to clients as 0 (kafka-features.sh "
                "upgrade --feature transaction.version=1). Then restart that broker and the query. Nothing "
                "is lost. See the runbook of OPERATOR.",
            )

    def _described(self, connection: Connection) -> Any:
        """Returns what the coordinator knows of the id; None if it knows nothing, or may not say it."""
        from kafka.protocol.admin import DescribeTransactionsRequest  # imports many messages, for a rare case

        request = DescribeTransactionsRequest(
            transactional_ids=[self._id], version=connection.version(DescribeTransactionsRequest, 0)
        )
        states = self._ask(connection, request).transaction_states or ()
        found = next((each for each in states if each.transactional_id == self._id), None)
        if found is None:
            raise TemporaryError(f"the answer of {connection.address} does not mention {self._id!r}")
        if found.error_code and is_transient(KafkaError(found.error_code)):
            raise KafkaException(KafkaError(found.error_code))
        return None if found.error_code else found
