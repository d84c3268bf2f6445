"""A token that a later version of this package wrote is refused, and nothing is written."""

from __future__ import annotations

import pytest

from integration.chaos.conftest import scenario as scenario
from integration.chaos.scenario import Scenario
from kafka_eos_source.protocol import token


@pytest.mark.fault("T133b", "an older version of the package meets a token of the next format", "restart")
def test_a_token_of_the_next_format_is_refused_with_the_version_that_wrote_it(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next version is killed after a commit that Spark's log lacks; the current one writes nothing."""
    scenario.feed(100)
    killed = scenario.start(
        f"commit.after_commit=kill-worker*2@{scenario.once('next')}", mutations=["next format"]
    )
    assert killed.wait() == -9, killed.tail()
    written = scenario.written()
    current = scenario.start()
    assert current.wait() == 1, current.tail()
    said = current.log.read_text()
    assert "[KAFKA_EOS.NEWER_VERSION]" in said
    assert "written by kafka-eos 99.0.0" in said
    assert scenario.written() == written
    scenario.run(mutations=["next format"])
    monkeypatch.setattr(token, "FORMAT", token.FORMAT + 1)  # the test itself reads the tokens too
    found = scenario.outcome()
    assert found.exactly_once, found
