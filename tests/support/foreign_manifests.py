"""Strategies for manifests of prepared batches that somebody edited, damaged or made up."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: Names that lead out of a folder, or that a system reads otherwise than it looks.
NAMES = (
    "../.bashrc",
    "../../../../../../.bashrc",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "",
    "part-00000.parquet/../../x",
    "part-00000.parquet\0",
    "part-00000.parquet\n",
    "..\\x",
    "file:///etc/passwd",
    "s3://other/bucket",
    "staged//x",
    "5/../../x.parquet",
    "\u0663/0a.parquet",
    "part-\u0663\u0663\u0663\u0663\u0663.parquet",
    "~/x",
)

#: Values of any type that JSON has, some of them extreme.
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(NAMES)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

#: Bytes that are no manifest: nested a hundred thousand deep, cut off, or of anything.
garbage = st.sampled_from(
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"",
        b"{}",
        b"[]",
        b"null",
        b"1",
        b"NaN",
        b'{"files":[]}',
        b"\xff\xfe",
    ]
) | st.binary(max_size=60)


@st.composite
def edited(draw: st.DrawFn, manifest: bytes) -> bytes:
    """Returns a manifest with other bytes: edited in one or several places, cut off, or replaced."""
    how = draw(st.sampled_from(["value", "value", "value", "bytes", "cut", "garbage"]))
    found = manifest
    if how == "value":
        content = json.loads(manifest)
        for _ in range(draw(st.integers(1, 3))):
            _edit(draw, content)
        found = json.dumps(content).encode()
    elif how == "bytes":
        at = draw(st.integers(0, len(manifest) - 1))
        found = manifest[:at] + draw(st.binary(min_size=1, max_size=3)) + manifest[at + 1 :]
    elif how == "cut":
        found = manifest[: draw(st.integers(0, len(manifest) - 1))]
    else:
        found = draw(garbage)
    return found if found != manifest else manifest + b" "


def _edit(draw: st.DrawFn, content: Any) -> None:
    """Changes, adds, doubles or removes one value, at any depth."""
    while isinstance(content, dict | list) and content:
        keys = sorted(content) if isinstance(content, dict) else range(len(content))
        key: Any = draw(st.sampled_from(keys))
        inner = content[key]
        if isinstance(inner, dict | list) and inner and draw(st.integers(0, 3)):
            content = inner
            continue
        how = draw(st.sampled_from(["name", "value", "remove", "double"]))
        if how == "remove":
            del content[key]
        elif how == "double" and isinstance(content, list):
            content.append(copy.deepcopy(inner))
        else:
            content[key] = draw(st.sampled_from(NAMES) if how == "name" else values)
        return
