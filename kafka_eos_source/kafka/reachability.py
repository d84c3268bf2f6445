"""Checks whether a cluster can be reached, and names the cause if it cannot.

A client connects to an address of ``bootstrap.servers`` first, and then to the addresses that the brokers
advertise. If it cannot reach those, librdkafka reports only that all brokers are down, after 44 s. This
module asks with the package's own client, which knows which address failed, why, and where it comes from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.failure import ADVERTISED_FIX, START_SECONDS, UNREACHABLE_FIX
from kafka_eos_source.kafka.wire.cluster import Cluster, TemporaryError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0
#: How long one pass over the brokers may take at least.
_PASS_SECONDS = 3.0
#: How long brokers that run may be unreachable at the addresses that they advertise, because DNS may learn of
#: new names a moment later.
_ADVERTISED_SECONDS = 3.0


class _AdvertisedError(Exception):
    """The bootstrap server answered, but no broker can be reached at the address that it advertises."""

    def __init__(self, bootstrap: str, causes: str) -> None:
        super().__init__(
            f"the bootstrap server {bootstrap} answered, but no broker can be reached at the address that it "
            f"advertises: {causes}"
        )


def check_reachable(config: Mapping[str, Any], seconds: float = START_SECONDS, *, every: bool = False) -> str:
    """Connects to a bootstrap server, and to a broker at the address that it advertises.

    Args:
        config: librdkafka properties of a client.
        seconds: how long to try; 0 = once.
        every: connect to all brokers, instead of stopping at the first one that answers.

    Returns:
        What is wrong although the cluster may work: brokers that cannot be reached while others can, or that
        accept connections and did not answer in time; "" if nothing is.

    Raises:
        UnavailableError: if no broker can be reached, because connections are refused or end, or host names
            do not resolve.
        AuthorizationError: if a broker refuses the login.
        InvalidOptionError: if a certificate or key cannot be used.
    """
    cluster, deadline = Cluster(config), Deadline.after_seconds(seconds)
    advertised = Deadline.after_seconds(_ADVERTISED_SECONDS)
    try:
        some = retry(
            lambda: _unreached(cluster, deadline, every=every),
            (TemporaryError, _AdvertisedError),
            Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
            permanent=lambda each: (
                each if isinstance(each, _AdvertisedError) and advertised.expired else None
            ),
        )
    except (TemporaryError, _AdvertisedError) as failure:
        if cluster.refusal is not None:
            raise cluster.refusal from failure
        if not cluster.refuses:
            return str(failure)
        if isinstance(failure, _AdvertisedError):
            raise UnavailableError(f"{failure}.", fix=ADVERTISED_FIX) from failure
        raise UnavailableError(
            f"no answer from Kafka at kafka.bootstrap.servers={cluster.bootstrap!r}: {cluster.unreached}.",
            fix=UNREACHABLE_FIX,
        ) from failure
    finally:
        cluster.close()
    if some:
        _log.warning("other brokers of the cluster answer, but this process %s", some)
    return some


def _is_at(cluster: Cluster, node: int, address: str) -> bool:
    """Returns whether a broker advertises this address."""
    host, port = cluster.brokers[node]
    return f"{host}:{port}" == address


def _unreached(cluster: Cluster, deadline: Deadline, *, every: bool) -> str:
    """Returns which brokers cannot be reached; stops at the first that can, unless ``every`` is set."""
    deadline = Deadline.after_seconds(max(_PASS_SECONDS, deadline.remaining_seconds()))
    cluster.metadata([], deadline)
    bootstrap = cluster.anyone(deadline).address
    causes: list[TemporaryError] = []
    # the broker that has answered needs no other connection; one that is silent must not delay a start
    nodes = sorted(cluster.brokers, key=lambda each: not _is_at(cluster, each, bootstrap))
    for index, node in enumerate(nodes):
        if _is_at(cluster, node, bootstrap):
            if every:
                continue
            break
        share = Deadline.after_seconds(deadline.remaining_seconds() / (len(nodes) - index))
        try:
            cluster.broker(node, share)
        except TemporaryError as cause:
            causes.append(cause)
        else:
            if not every:
                break
    text = "; ".join(map(str, causes))
    if causes and len(causes) == len(nodes):
        raise _AdvertisedError(bootstrap, text)
    return text
