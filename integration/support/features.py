"""Reads and changes the finalized features of a cluster with Kafka's own tool, as an operator does."""

from __future__ import annotations

import re
from typing import NamedTuple

from integration.support.tools import run

_TOOL = "org.apache.kafka.tools.FeatureCommand"
# the tool writes "UNKNOWN 33" for a level of metadata.version that is newer than the tool
_LINE = re.compile(r"Feature: (\S+)\s.*SupportedMaxVersion: (?:UNKNOWN )?(\S+).*Level: (?:UNKNOWN )?(\S+)")


class Levels(NamedTuple):
    """Levels of one feature: a number, or a name such as ``3.9-IV0`` for ``metadata.version``."""

    highest: str
    finalized: str


def levels(bootstrap: str) -> dict[str, Levels]:
    """Returns the highest level that all brokers support, and the finalized one, by feature."""
    said = run(_TOOL, "--bootstrap-server", bootstrap, "describe")
    return {name: Levels(highest, finalized) for name, highest, finalized in _LINE.findall(said)}


def finalize_newest(bootstrap: str, release: str) -> None:
    """Ends an upgrade: raises all features to those of a release, and metadata.version to the highest.

    The tool knows the levels of releases up to its own; newer brokers support a higher metadata.version.
    """
    upgrade(bootstrap, "--release-version", release)
    highest, finalized = levels(bootstrap)["metadata.version"]
    if highest != finalized:
        upgrade(bootstrap, "--feature", f"metadata.version={highest}")


def upgrade(bootstrap: str, *what: str) -> None:
    """Raises features: ``--feature transaction.version=2``, or ``--release-version 4.3`` for all.

    Fails the test if the controller refuses.
    """
    run(_TOOL, "--bootstrap-server", bootstrap, "upgrade", *what)


def downgrade(bootstrap: str, *what: str) -> None:
    """Lowers features. Fails the test if the controller refuses."""
    run(_TOOL, "--bootstrap-server", bootstrap, "downgrade", *what)
