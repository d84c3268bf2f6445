"""Fixtures of the chaos suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.proxy import Proxy
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support.driver import Driver
from integration.support.faults import MEASURES, Measures
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import free_ports


@dataclass
class Proxied:
    """A broker that clients can reach only through a proxy."""

    kafka: EmbeddedKafka
    proxy: Proxy

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.proxy.port}"


@contextmanager
def behind_a_proxy(**arguments: Any) -> Iterator[Proxied]:
    """Runs a single-broker cluster that advertises the proxy's address.

    Args:
        arguments: those of `EmbeddedKafka` that differ from the other tests'.
    """
    proxy = Proxy()
    (proxy.upstream_port,) = free_ports([0])
    config = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
    try:
        with EmbeddedKafka(
            port=proxy.upstream_port,
            config=config,
            java_options=brokers.JAVA_OPTIONS,
            **{**brokers.version(os.environ), **arguments},
        ) as kafka:
            yield Proxied(kafka, proxy)
    finally:
        proxy.close()


@pytest.fixture(scope="session")
def proxied() -> Iterator[Proxied]:
    with behind_a_proxy() as both:
        yield both


@pytest.fixture
def scenario(
    request: pytest.FixtureRequest, broker: str, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    """A scenario on the session's broker."""
    made = Scenario(broker, tmp_path, driver)
    yield made
    report_measures(request.node, made)


@pytest.fixture
def behind_proxy(
    request: pytest.FixtureRequest, proxied: Proxied, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    """A scenario on the broker behind the proxy."""
    proxied.proxy.catch_nothing()
    made = Scenario(proxied.bootstrap, tmp_path, driver)
    yield made
    report_measures(request.node, made)


def report_measures(item: pytest.Item, scenario: Scenario) -> None:
    """Attaches the test's measures, for the table in `docs/faults.md`."""
    found = scenario.last_outcome
    if found is not None:
        measures = Measures(
            drivers=scenario.starts,
            batches=0 if found.token is None else found.token.batch_id + 1,
            rows=found.rows.expected,
            lost=found.rows.missing,
            doubled=found.rows.doubled + found.rows.foreign,
        )
        item.user_properties.append((MEASURES, asdict(measures)))
