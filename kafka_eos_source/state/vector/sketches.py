"""Aggregates that approximate: approx_count_distinct and percentile_approx.

Both sketches are deterministic: the same rows in the same parts give the same state, so a batch that Spark
computes again has the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import type_to_json
from kafka_eos_source.state.encoding.layout import hash_columns
from kafka_eos_source.state.vector.accumulators import Accumulator, supported_type, unsupported_type
from kafka_eos_source.state.vector.arrays import Plan, numbers_in_order, row_numbers, rows_of, sum_type

# -- approx_count_distinct: HyperLogLog
#
# The hash of a value selects one of 2^p registers, and the register keeps the largest *rank* that it has
# seen: the number of leading zeros of the other bits of the hash, plus 1. (Flajolet et al., "HyperLogLog: the
# analysis of a near-optimal cardinality estimation algorithm", 2007; with a hash of 64 bits as in Heule et
# al., "HyperLogLog in Practice", 2013.) The estimate is the one of Otmar Ertl, "New cardinality estimation
# algorithms for HyperLogLog sketches", 2017: it has no bias for any number of values and needs no tables.
#
# An *entry* is a register with its rank in one number, ``register << 6 | rank``.

_RANK_BITS = 6
#: Seeds of the two halves of the hash. They differ from the seed that decides the shard of a key.
SEEDS = (0x9747B28C, 0x3C6EF372)
#: Groups whose number of values is estimated at a time, which bounds memory.
_ESTIMATED = 1 << 14


class DistinctSketch(Accumulator):
    """The aggregate approx_count_distinct; the state is a HyperLogLog sketch.

    The state of a group is either its entries in ascending order (2 or 4 bytes each, little endian), or the
    rank of each register (1 byte each), whichever is shorter.

    Args:
        name: name of the result.
        aggregate: the declaration.
        type_: type of the input column.
    """

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType) -> None:
        self._column = aggregate.inputs[0]
        self._hashed = _hashed_type(supported_type(name, aggregate, self._column, type_))
        self._bits = max(4, math.ceil(2 * math.log2(1.106 / aggregate["rsd"])))
        self._registers = 1 << self._bits
        self._entry = np.dtype("<u2" if self._bits + _RANK_BITS <= 16 else "<u4")
        self.result = pa.int64()
        self.state = [pa.field(f"{name}__registers", pa.binary())]

    def state_declaration(self, aggregate: Aggregate) -> dict[str, Any]:
        return {**aggregate.to_json(), "hashed": type_to_json(self._hashed)}

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column]
        present = binary.valid(column)
        entries = self._entries(column)

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            numbers, groups = rows_of(grouped[0])
            numbers = np.asarray(numbers)
            kept = present[numbers]
            return [self._encoded(groups[kept], entries[numbers[kept]], len(grouped[0]))]

        return Plan([row_numbers(column)], collect)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        owners, entries = self._decoded(states[0])

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            numbers, groups = rows_of(grouped[0])
            group_of = np.empty(len(numbers), np.int64)
            group_of[np.asarray(numbers)] = groups
            return [self._encoded(group_of[owners], entries, len(grouped[0]))]

        return Plan([row_numbers(states[0])], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        (owners, entries), (more_owners, more_entries) = self._decoded(old[0]), self._decoded(new[0])
        groups = np.concatenate([owners, more_owners])
        return [self._encoded(groups, np.concatenate([entries, more_entries]), len(old[0]))]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        parts = [
            self._estimates(states[0].slice(start, _ESTIMATED))
            for start in range(0, len(states[0]), _ESTIMATED)
        ]
        return pa.array(np.concatenate([np.zeros(0, np.int64), *parts]), pa.int64())

    def _entries(self, column: pa.Array) -> Ints:
        """Returns the entry of each value; any for null."""
        column = column.cast(self._hashed)
        high, low = (hash_columns([column], seed).view(np.uint32).astype(np.uint64) for seed in SEEDS)
        hashes = high << np.uint64(32) | low
        register: Ints = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        # A one after the last bit ends the zeros.
        rest = hashes << np.uint64(self._bits) | np.uint64(1 << (self._bits - 1))
        entries: Ints = register << _RANK_BITS | (_leading_zeros(rest) + 1)
        return entries

    def _encoded(self, groups: Ints, entries: Ints, count: int) -> pa.BinaryArray:
        """Returns the state of each group: the largest rank of each register."""
        sorted_ = np.sort(groups << 32 | entries)
        registers = sorted_ >> _RANK_BITS
        kept = sorted_[np.append(registers[1:] != registers[:-1], True)] if len(sorted_) else sorted_
        groups, entries = kept >> 32, kept & 0xFFFFFFFF
        counts = np.bincount(groups, minlength=count)
        is_dense = counts * self._entry.itemsize >= self._registers
        lengths = np.where(is_dense, self._registers, counts * self._entry.itemsize)
        begins = np.concatenate([[0], np.cumsum(lengths)])
        if begins[-1] > np.iinfo(np.int32).max:
            raise OverflowError(f"sketches of {begins[-1]} bytes exceed the 2 GiB that one Arrow array holds")
        flat = np.zeros(int(begins[-1]), np.uint8)
        dense = is_dense[groups]
        at = begins[groups[dense]] + (entries[dense] >> _RANK_BITS)
        flat[at] = entries[dense] & ((1 << _RANK_BITS) - 1)
        sparse = np.repeat(~is_dense, lengths)
        flat[sparse] = entries[~dense].astype(self._entry).view(np.uint8)
        return binary.from_parts(begins, flat)

    def _decoded(self, states: pa.BinaryArray) -> tuple[Ints, Ints]:
        """Returns all entries of some states, and for each the number of its state."""
        lengths = np.where(binary.valid(states), np.diff(binary.offsets(states)), 0)
        is_dense = lengths == self._registers
        matrix = binary.head(states.filter(pa.array(is_dense)), self._registers)
        row, register = np.nonzero(matrix)
        dense = register << _RANK_BITS | matrix[row, register]
        sparse = states.filter(pa.array(~is_dense & (lengths > 0)))
        begins = binary.offsets(sparse)
        flat = np.ascontiguousarray(binary.data(sparse)[begins[0] : begins[-1]])
        owners = np.repeat(np.arange(len(states)), np.where(is_dense, 0, lengths // self._entry.itemsize))
        return (
            np.concatenate([owners, np.flatnonzero(is_dense)[row]]),
            np.concatenate([flat.view(self._entry).astype(np.int64), dense]),
        )

    def _estimates(self, states: pa.BinaryArray) -> Ints:
        """Returns the estimated number of distinct values of each state."""
        owners, entries = self._decoded(states)
        count, most = len(states), 64 - self._bits + 1  # the largest rank
        ranks = entries & ((1 << _RANK_BITS) - 1)
        having = np.bincount(owners * (most + 1) + ranks, minlength=count * (most + 1)).astype(np.float64)
        having = having.reshape(count, most + 1)
        having[:, 0] = self._registers - having.sum(axis=1)
        total = self._registers * _tau(1 - having[:, most] / self._registers)
        for rank in range(most - 1, 0, -1):
            total = (total + having[:, rank]) / 2
        with np.errstate(divide="ignore"):
            total = total + self._registers * _sigma(having[:, 0] / self._registers)
            estimate = self._registers**2 / (2 * math.log(2)) / total
        rounded: Ints = np.rint(estimate).astype(np.int64)
        return rounded


def _hashed_type(type_: pa.DataType) -> pa.DataType:
    """Returns the type as which values are hashed, so that a column may be widened."""
    if pa.types.is_signed_integer(type_):
        return pa.int64()
    if binary.is_float(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(38, type_.scale)
    return type_


def _leading_zeros(values: NDArray[np.uint64]) -> Ints:
    """Returns the number of leading zero bits of each value, none of which is 0."""
    high = (values >> np.uint64(32)).astype(np.float64)  # 32 bits are exact in a double
    low = (values & np.uint64(0xFFFFFFFF)).astype(np.float64)
    exponents = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    zeros: Ints = 64 - exponents.astype(np.int64)
    return zeros


def _sigma(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns σ of Ertl's estimate for the share of registers that are empty; infinite if all are."""
    power, weight, total = share.copy(), 1.0, share.copy()
    while True:
        power = power * power
        before = total
        total = total + power * weight
        weight += weight
        if bool(((total == before) | (power == 1)).all()):
            return np.where(share == 1, np.inf, total)


def _tau(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns τ of Ertl's estimate for the share of registers that do not have the largest rank."""
    power, weight, total = share.copy(), 1.0, 1 - share
    while True:
        power = np.sqrt(power)
        before = total
        weight /= 2
        total = total - (1 - power) ** 2 * weight
        if bool((total == before).all()):
            return np.where((share == 0) | (share == 1), 0.0, total / 3)


# -- percentile_approx: a summary as in Greenwald and Khanna, "Space-efficient online computation of quantile
# summaries" (2001), which Spark uses too; here it also knows how often a value occurs.
#
# An entry of a group's summary is one of its values, with three numbers:
#
#   equal    how many values are known to equal it
#   loose    how many other values are known to be at most it, and greater than the value of the entry before
#   spread   how many more values may be at most it: they are counted in later entries
#
# The *rank* of an entry is the sum of ``equal`` and ``loose`` up to it. The number of values that are at most
# the entry's is between the rank and the rank plus ``spread``.
#
# Let ``loose + spread`` of every entry be at most ``2 n / accuracy``, with n values in the group. Then each
# rank from 1 to n has an entry whose rank differs from it by at most ``n / accuracy``, rounded up. Rows give
# exact entries, with 0 in both, and merging two summaries keeps the condition.
#
# A stored summary with more than ``accuracy`` entries is compressed: it loses entries as long as the
# condition holds. If every new summary used the whole allowance too, merging would add up both, and no entry
# could ever be dropped again. So summaries of new rows are compressed only to an eighth of it.


#: How much finer than a stored summary one of new rows is.
_FINER = 8


class Quantiles(Accumulator):
    """The aggregate percentile_approx; the state is a summary of the values.

    Args:
        name: name of the result.
        aggregate: the declaration.
        type_: type of the input column.
    """

    def __init__(self, name: str, aggregate: Aggregate, type_: pa.DataType) -> None:
        self._column = aggregate.inputs[0]
        is_time = pa.types.is_date32(type_) or pa.types.is_timestamp(type_)
        if not is_time and sum_type(type_) is None:
            expected = "an integer, float, double, decimal, date or timestamp column"
            raise unsupported_type(name, aggregate, self._column, type_, expected)
        percentage = aggregate["percentage"]
        self._is_array = isinstance(percentage, tuple)
        self._percentages = percentage if self._is_array else (percentage,)
        self._accuracy = aggregate["accuracy"]
        self._type = type_
        self.result = pa.list_(type_) if self._is_array else type_
        numbers = [pa.field(f"{name}__{each}", pa.list_(pa.int64())) for each in ("equal", "loose", "spread")]
        self.state = [pa.field(f"{name}__values", pa.list_(type_)), *numbers]

    def state_declaration(self, aggregate: Aggregate) -> dict[str, Any]:
        return {name: value for name, value in aggregate.to_json().items() if name != "percentage"}

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        column = rows[self._column]
        present = binary.valid(column)

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            numbers, groups = rows_of(grouped[0])
            kept = present[np.asarray(numbers)]
            values = column.take(numbers.filter(pa.array(kept)))
            ones, zeros = np.ones(len(values), np.int64), np.zeros(len(values), np.int64)
            # Each value is a summary of its own group that knows everything, so the sources do not matter.
            return self._merged(values, [ones, zeros, zeros], groups[kept], None, len(grouped[0]))

        return Plan([row_numbers(column)], collect)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            rows, groups = rows_of(grouped[0])
            return self._of_lists([column.take(rows) for column in states], groups, len(grouped[0]))

        return Plan([row_numbers(states[0])], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        both = [pa.concat_arrays(pair) for pair in zip(old, new, strict=True)]
        return self._of_lists(both, np.tile(np.arange(len(old[0])), 2), len(old[0]))

    def _of_lists(self, states: Sequence[pa.Array], groups: Ints, count: int) -> list[pa.Array]:
        """Merges states; ``groups`` has the group of each."""
        lengths = binary.list_lengths(states[0])
        numbers = [binary.raw(column.flatten(), np.int64) for column in states[1:]]
        sources = np.repeat(np.arange(len(lengths)), lengths)
        return self._merged(states[0].flatten(), numbers, np.repeat(groups, lengths), sources, count)

    def _merged(
        self, values: pa.Array, numbers: list[Ints], groups: Ints, sources: Ints | None, count: int
    ) -> list[pa.Array]:
        """Merges the summaries of each group into one.

        Args:
            values: the values of all entries, source after source, and in ascending order in each source.
            numbers: ``equal``, ``loose`` and ``spread`` of each entry.
            groups: the group of each entry.
            sources: the summary that each entry is from; None = all ``loose`` and ``spread`` are 0, and the
                entries are in any order.
            count: number of groups.
        """
        equal, loose, spread = numbers
        order_of = numbers_in_order(values)
        order = np.lexsort((order_of, groups))
        sorted_groups, sorted_values = groups[order], order_of[order]
        # A run consists of the entries of a group that have the same value; it becomes one entry.
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (sorted_groups[1:] != sorted_groups[:-1]) | (sorted_values[1:] != sorted_values[:-1])
        run_of_sorted = np.cumsum(begins) - 1
        run = np.empty(len(order), np.int64)
        run[order] = run_of_sorted
        runs = int(begins.sum())
        firsts = order[begins]
        group_of_run = groups[firsts]
        merged = [_summed(run, each, runs) for each in (equal, loose, spread)]
        if sources is not None and bool((loose + spread).any()):
            # Between an entry and the one before it in its source, the other sources' values do not know on
            # which side of them the uncertain values of that entry are.
            uncertain = loose + spread
            start_of_group = np.searchsorted(group_of_run, np.arange(count))
            is_first = np.ones(len(run), np.bool_)
            is_first[1:] = sources[1:] != sources[:-1]
            before = np.concatenate([[0], run[:-1]]) + 1
            before = np.where(is_first, start_of_group[groups], before)
            more = _summed(before, uncertain, runs + 1) - _summed(run, uncertain, runs + 1)
            merged[2] = merged[2] + np.cumsum(more)[:runs]
        most = _FINER * self._accuracy
        return self._summaries(values.take(pa.array(firsts)), merged, group_of_run, count, most)

    def settled(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        lengths = binary.list_lengths(states[0])
        if not len(lengths) or int(lengths.max()) <= self._accuracy:
            return list(states)
        numbers = [binary.raw(column.flatten(), np.int64) for column in states[1:]]
        groups = np.repeat(np.arange(len(lengths)), lengths)
        return self._summaries(states[0].flatten(), numbers, groups, len(lengths), self._accuracy)

    def _summaries(
        self, values: pa.Array, numbers: list[Ints], groups: Ints, count: int, accuracy: int
    ) -> list[pa.Array]:
        """Returns the entries of each group, compressed if there are more than ``accuracy``."""
        lengths = np.bincount(groups, minlength=count)
        (large,) = np.nonzero(lengths > accuracy)
        if len(large):
            kept = np.ones(len(groups), np.bool_)
            starts = np.cumsum(lengths) - lengths
            for start, length in zip(starts[large].tolist(), lengths[large].tolist(), strict=True):
                end = start + length
                equal, loose, spread = (each[start:end] for each in numbers)
                kept[start:end] = _compressed(equal, loose, spread, accuracy)
            # What an entry is dropped with becomes loose in the next entry that is kept.
            equal, loose, spread = numbers
            rank = np.cumsum(equal + loose)[kept]
            loose = np.diff(rank, prepend=0) - equal[kept]
            numbers = [equal[kept], loose, spread[kept]]
            values = values.filter(pa.array(kept))
            lengths = np.bincount(groups[kept], minlength=count)
        lists = [
            binary.lists_of(pa.array(each, pa.int64()), lengths, pa.list_(pa.int64())) for each in numbers
        ]
        return [binary.lists_of(values, lengths, self.state[0].type), *lists]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        lengths = binary.list_lengths(states[0])
        values = states[0].flatten()
        equal, loose, spread = (binary.raw(column.flatten(), np.int64) for column in states[1:])
        some = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[some]
        if not len(starts):
            return pa.nulls(len(lengths), self.result)
        total = np.cumsum(equal + loose)
        before = np.concatenate([[0], total])[starts]
        rank = total - np.repeat(before, lengths[some])
        n = np.add.reduceat(equal + loose, starts)
        found = []
        for percentage in self._percentages:
            wanted = np.repeat(np.maximum(np.ceil(percentage * n).astype(np.int64), 1), lengths[some])
            # How far the rank of this value may be below and above the wanted one.
            off = np.maximum(wanted - rank, rank + spread - equal + 1 - wanted)
            best = np.repeat(np.minimum.reduceat(off, starts), lengths[some])
            at = np.where(off == best, np.arange(len(off)), len(off))
            picked = np.zeros(len(lengths), np.int64)
            picked[some] = np.minimum.reduceat(at, starts)
            found.append(picked)
        taken = [values.take(pa.array(each, mask=~some)) for each in found]
        if not self._is_array:
            return taken[0]
        count = len(found)
        by_group = np.arange(count * len(lengths)).reshape(count, -1).T[some].reshape(-1)
        every = pa.concat_arrays(taken).take(pa.array(by_group))
        return binary.lists_of(every, np.where(some, count, 0), self.result, some)


def _summed(at: Ints, numbers: Ints, count: int) -> Ints:
    """Returns the sum of the numbers at each position."""
    found: Ints = np.bincount(at, numbers, count).astype(np.int64)  # doubles are exact up to 2^53
    return found


def _compressed(equal: Ints, loose: Ints, spread: Ints, accuracy: int) -> NDArray[np.bool_]:
    """Returns which entries of a group are kept: as few as the condition allows, with the first and last."""
    rank = np.cumsum(equal + loose)
    allowed = 2 * int(rank[-1]) // accuracy
    # An entry can follow one with rank r if its number of uncertain values, ``reach - r``, is allowed. The
    # smallest reach from each entry on finds the last one that can, past those that cannot.
    reach = np.minimum.accumulate((rank + spread - equal)[::-1])[::-1]
    furthest = np.searchsorted(reach, rank + allowed, side="right") - 1
    following = np.maximum(furthest, np.arange(1, len(rank) + 1)).tolist()
    kept = np.zeros(len(rank), np.bool_)
    at, last = 0, len(rank) - 1
    while at < last:
        kept[at] = True
        at = min(following[at], last)
    kept[last] = True
    return kept
