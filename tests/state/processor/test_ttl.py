"""State with a time to live behaves like a model, for any operations at any times."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.state.processor.processor_shard import Shard, check_indexes
from tests.state.processor.scripted_processor import INPUT, OPS, ops, results, scripted

_TTL_MS = 20
_OPS = [op for op in OPS if op[0] in "vlm"]


class _Model:
    """The state of one key: each row with its time of expiry."""

    def __init__(self) -> None:
        self.v: tuple[int, int] | None = None
        self.l: list[tuple[int, int]] = []
        self.m: dict[int, tuple[int, int]] = {}

    def sweep(self, now_ms: int) -> None:
        self.v = self.v if self.v and self.v[1] > now_ms else None
        self.l = [row for row in self.l if row[1] > now_ms]
        self.m = {key: row for key, row in self.m.items() if row[1] > now_ms}

    def apply(self, op: str, a: int, b: int, now_ms: int) -> Any:
        until = now_ms + _TTL_MS
        rows = [(a + i, until) for i in range(b + 1)]
        if op == "v.update":
            self.v = (a, until)
        elif op == "v.clear":
            self.v = None
        elif op == "l.put":
            self.l = rows
        elif op in ("l.append", "l.extend"):
            self.l = self.l + (rows if op == "l.extend" else [(a, until)])
        elif op == "l.clear":
            self.l = []
        elif op == "m.put":
            self.m[a] = (b, until)
        elif op == "m.remove":
            self.m.pop(a, None)
        elif op == "m.clear":
            self.m = {}
        else:
            return self.read(op, a)
        return None

    def read(self, op: str, a: int) -> Any:
        items = sorted(((key,), (row[0],)) for key, row in self.m.items())
        found = self.m.get(a)
        answers = {
            "v.get": self.v and (self.v[0],),
            "v.exists": self.v is not None,
            "l.get": [(row[0],) for row in self.l],
            "l.exists": bool(self.l),
            "m.get": found and (found[0],),
            "m.has": found is not None,
            "m.items": items,
            "m.keys": [key for key, _ in items],
            "m.values": sorted(value for _, value in items),
        }
        return answers[op]


_BATCH = st.tuples(
    st.integers(0, 15),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(_OPS), st.integers(0, 3), st.integers(0, 2)),
        max_size=12,
    ),
)


@settings(max_examples=80)
@given(st.lists(_BATCH, min_size=1, max_size=8))
def test_state_with_a_time_to_live_equals_the_model_for_any_operations(
    batches: list[tuple[int, list[tuple[str, str, int, int]]]],
) -> None:
    shard, models = Shard(scripted(ttl_ms=_TTL_MS), INPUT), {"a": _Model(), "b": _Model()}
    now_ms = 0
    for after_ms, rows in batches:
        now_ms += after_ms
        for model in models.values():
            model.sweep(now_ms)
        for key, model in models.items():
            mine = [row for row in rows if row[0] == key]
            given_ops = [row for name, op, a, b in mine for row in ops(name, f"{op} {a} {b}")]
            expected = [str(model.apply(op, a, b, now_ms)) for _, op, a, b in mine]
            assert results(shard.batch(given_ops, now_ms)) == expected
        check_indexes(shard)
        held = [(entry.value[0], entry.expiry_ms) for entry in shard.entries()]
        kept = [row for model in models.values() for row in ([model.v] if model.v else [])]
        kept += [row for model in models.values() for row in [*model.l, *model.m.values()]]
        assert sorted(held) == sorted(kept)
    shard.batch(time_ms=now_ms + _TTL_MS)
    assert [key for key in shard.state.rows if key[0] != 1] == []  # type: ignore[attr-defined]
