"""The tests without JVM and broker. README.md says where a test goes."""

from pathlib import Path

#: The root of the repository.
ROOT = Path(__file__).parents[1]
