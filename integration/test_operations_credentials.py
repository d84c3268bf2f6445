"""Passwords and certificates change under a running query: no record is lost or doubled.

The query says that it has to be restarted, or does not notice. `test_security` covers credentials that never
worked, and rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from integration.chaos.brokers import NEW
from integration.chaos.conftest import report_measures
from integration.chaos.load import Load
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support.driver import Driver
from integration.support.security import TlsCluster, tls_cluster
from kafka_eos_source.protocol.identity import group_of

#: Clients have to log in again after this time, so that brokers soon ask for the new password.
_SESSION_MS = 2000
NEW_PASSWORD = "writer-pass-6e"


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    config = {"connections.max.reauth.ms": str(_SESSION_MS)}
    folder = tmp_path_factory.mktemp("tls")
    with tls_cluster(folder, config, version=NEW, java_options=brokers.JAVA_OPTIONS) as running:
        yield running


@pytest.fixture
def on_secured(
    request: pytest.FixtureRequest, secured: TlsCluster, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    """A scenario whose query logs in as ``writer``; its helpers use the listener without login."""
    made = Scenario(secured.without_login, tmp_path, driver)
    grant(secured, "writer", made)
    yield made
    report_measures(request.node, made)


def grant(secured: TlsCluster, user: str, scenario: Scenario) -> None:
    """Grants a user all rights that the query needs."""
    secured.allow(user, "topic", scenario.source, "READ")
    secured.allow(user, "topic", scenario.sink, "READ", "WRITE")
    secured.allow(user, "group", group_of(scenario.application_id), "READ")
    secured.allow(user, "transactional_id", scenario.application_id, "WRITE")


def log_in(
    secured: TlsCluster, sink: Mapping[str, str] | None = None, **changed: str
) -> dict[str, dict[str, str]]:
    """Returns options for `Load.start`: source and sink log in as ``writer``, unless ``changed``."""
    options = secured.options("writer", **changed)
    return {"source": dict(options), "sink": {**options, **(sink or {})}}


@pytest.mark.long
@pytest.mark.fault("T140", "the password of a query is changed", "under load; a driver is killed")
def test_t140_a_query_whose_password_was_changed_says_so_and_continues_with_the_new_one(
    on_secured: Scenario, secured: TlsCluster
) -> None:
    quick = {"commitTimeoutMs": "10000"}
    with Load(on_secured) as load:
        running = load.start(**log_in(secured, quick))
        load.await_progress(running)
        secured.set_password("writer", NEW_PASSWORD)
        assert "If the credentials were changed, restart the query" in refusal(running)
        assert "correct the credentials: kafka.sasl.username" in refusal(load.start(**log_in(secured, quick)))
        renewed = log_in(secured, sasl_password=NEW_PASSWORD)
        running = load.start(**renewed)
        load.await_progress(running)
        running.kill()
        running = load.start(**renewed)
        load.await_progress(running)
        load.judge(running)


@pytest.mark.long
@pytest.mark.fault("T140", "the password of a query is changed", "under load; a driver is killed")
def test_t140_a_second_user_takes_over_without_an_error(
    on_secured: Scenario, secured: TlsCluster, driver: Callable[..., Driver]
) -> None:
    """The planned way: the new credentials work before the old ones end."""
    with Load(on_secured) as load:
        running = load.start(**log_in(secured))
        load.await_progress(running)
        secured.set_password("writer-2", NEW_PASSWORD)
        grant(secured, "writer-2", on_secured)
        running.kill()
        running = load.start(**log_in(secured, sasl_username="writer-2", sasl_password=NEW_PASSWORD))
        load.await_progress(running)
        secured.set_password("writer", "nobody-knows-it-2b")
        load.await_progress(running)
        load.judge(running)


T141 = pytest.mark.fault("T141", "the brokers get another certificate", "under load; the broker restarts")


@pytest.mark.long
@T141
@pytest.mark.parametrize("authority", ["ca", "other"], ids=["same-authority", "another-trusted-authority"])
def test_t141_a_query_accepts_another_certificate_of_a_trusted_authority(
    on_secured: Scenario, secured: TlsCluster, authority: str
) -> None:
    trusted = on_secured.folder / "trusted.pem"
    trusted.write_text(secured.ca.read_text() + secured.other_ca.read_text())
    with Load(on_secured) as load:
        running = load.start(**log_in(secured, ssl_ca_location=str(trusted)))
        load.await_progress(running)
        secured.replace_certificate(authority)
        load.await_progress(running)
        load.judge(running)


@pytest.mark.long
@T141
def test_t141_a_query_that_does_not_trust_the_new_authority_says_so_and_continues_after_a_restart(
    on_secured: Scenario, secured: TlsCluster
) -> None:
    """Running clients do not read the file of authorities again; those of the next run do."""
    trusted = on_secured.folder / "trusted.pem"
    trusted.write_text(secured.ca.read_text())
    login = log_in(secured, {"commitTimeoutMs": "20000"}, ssl_ca_location=str(trusted))
    login["source"]["kafkaConsumer.pollTimeoutMs"] = "20000"
    with Load(on_secured) as load:
        running = load.start(**login)
        load.await_progress(running)
        trusted.write_text(secured.ca.read_text() + secured.other_ca.read_text())
        secured.replace_certificate("other")
        assert "If the brokers' certificates were changed, restart the query" in refusal(running)
        running = load.start(**login)
        load.await_progress(running)
        load.judge(running)


def refusal(driver: Driver) -> str:
    """Waits until a driver fails because brokers refuse its login; returns the error."""
    assert driver.wait() == 1
    failed = [line for line in driver.log.read_text().splitlines() if line.startswith("QUERY FAILED")]
    assert "KAFKA_EOS.NOT_AUTHORIZED" in failed[-1], failed
    return failed[-1]
