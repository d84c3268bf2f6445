"""Exports histories for Jepsen, so that an independent checker can judge the same run.

``python -m integration.support.jepsen driver.jsonl reader.jsonl > history.edn`` writes one operation per
line, in the form that ``jepsen.tests.kafka`` reads::

    {:index 0, :time 0, :process 0, :type :invoke, :f :txn, :value [[:send "out-1" "k=k:7"]]}
    {:index 1, :time 9, :process 0, :type :ok, :f :txn, :value [[:send "out-1" [17 "k=k:7"]]]}
    {:index 2, :time 12, :process 1, :type :invoke, :f :poll, :value [[:poll]]}
    {:index 3, :time 12, :process 1, :type :ok, :f :poll, :value [[:poll {"out-1" [[17 "k=k:7"]]}]]}

To check it with Clojure and the library ``jepsen`` (no cluster is needed)::

    (require '[clojure.edn :as edn] '[clojure.java.io :as io]
             '[jepsen.history :as history] '[jepsen.tests.kafka :as kafka])
    (with-open [lines (io/reader "history.edn")]
      (let [found (->> (line-seq lines) (mapv edn/read-string) history/history kafka/analysis :errors)]
        (apply dissoc found (kafka/allowed-error-types {}))))    ; {} = nothing is wrong

Jepsen throws ``:no-writer-of-value`` if a value was read from a partition to which it was never sent. It does
not know source ranges. Values that were written, but not read by a successful operation at the end of the
run, are ``:unseen``; so the run must read the input of a query to its end, too.

The translation:

* Jepsen's keys are partitions; its values are unique within one: record key and value, joined by ``=``.
* All attempts at a micro-batch are one operation, from the start of the first to the acknowledgement.
* The offsets of sent records are those that readers saw, because a transaction does not return them. If a
  partitioner chooses the partition and no reader saw the record, its partition is ``?``.
* Within a transaction, only the order per record key counts. So sends of different keys to one partition
  are written in the order of the log.
* A Jepsen process does one thing at a time and ends with an operation of unknown outcome; what follows gets a
  new process number.
* Left out: read_uncommitted readers, which Jepsen does not know, and source topics without recorded writers,
  whose values Jepsen would take for invented ones.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import click

from integration.support.checker import Observed, Transaction, observe, transactions
from integration.support.history import (
    READ_COMMITTED,
    History,
    Operation,
    Phase,
    Poll,
    Record,
    Send,
    read_history,
)


class _Done(NamedTuple):
    """An operation in Jepsen's form: what was intended, and the result."""

    actor: str  #: name of a process that runs one operation at a time
    begin_ns: int
    end_ns: int
    outcome: Phase
    function: str
    intended: str
    result: str


class _Line(NamedTuple):
    time_ns: int
    process: str
    type: str
    function: str
    value: str


def edn(history: History) -> Iterator[str]:
    """Yields the history as lines of EDN."""
    lines = [
        _Line(each.time_ns, ":nemesis", "info", "fault", json.dumps(each.what.what))
        for each in history.faults
    ]
    lines += _in_processes(_operations(history))
    lines.sort(key=lambda line: line.time_ns)  # stable, so the lines of one process keep their order
    for index, each in enumerate(lines):
        yield (
            f"{{:index {index}, :time {each.time_ns - lines[0].time_ns}, :process {each.process}, "
            f":type :{each.type}, :f :{each.function}, :value {each.value}}}"
        )


def _operations(history: History) -> Iterator[_Done]:
    ends_ns = [max(each.completed_ns or 0, each.time_ns) for each in history.txns]
    ends_ns += [max(each.completed_ns or 0, each.time_ns) for each in history.polls]
    last_ns = max(ends_ns, default=0)
    observed = observe(history)
    known = transactions(history, observed.seen_ns)
    written = {send.topic for each in known for send in each.txn.sends}
    for each in known:
        yield _transaction(each, observed, written, last_ns)
    for poll in history.polls:
        if poll.what.isolation == READ_COMMITTED:
            yield _poll(poll, written, last_ns)


def _in_processes(operations: Iterable[_Done]) -> Iterator[_Line]:
    """Assigns process numbers; a new number follows an operation of unknown outcome."""
    by_actor: dict[str, list[_Done]] = defaultdict(list)
    for each in operations:
        by_actor[each.actor].append(each)
    numbers = count()
    for done in by_actor.values():
        process, free_ns = next(numbers), 0
        for each in sorted(done, key=lambda each: each.begin_ns):
            if each.begin_ns < free_ns:
                process = next(numbers)
            yield _Line(each.begin_ns, str(process), "invoke", each.function, each.intended)
            yield _Line(each.end_ns, str(process), each.outcome.value, each.function, each.result)
            free_ns = each.end_ns if each.outcome is not Phase.INFO else sys.maxsize


def _transaction(each: Transaction, observed: Observed, written: set[str], last_ns: int) -> _Done:
    end_ns = last_ns if each.completed_ns is None else each.completed_ns
    reads = [record for record in each.txn.reads or () if record.topic in written]
    intended = ["[:poll]"] if reads else []
    result = [f"[:poll {_by_partition(reads)}]"] if reads else []
    for send in _in_log_order(each.txn.sends, observed):
        place = observed.places.get(send.identity)
        partition = send.partition if send.partition is not None or place is None else place[1]
        key = json.dumps(f"{send.topic}-{'?' if partition is None else partition}")
        value = _value(send.key, send.value)
        intended.append(f"[:send {key} {value}]")
        if place is None or place[1] != partition or each.outcome is Phase.FAIL:
            result.append(intended[-1])
        else:
            result.append(f"[:send {key} [{place[2]} {value}]]")
    return _Done(
        actor=f"writer {each.query}",
        begin_ns=end_ns if each.invoked_ns is None else each.invoked_ns,
        end_ns=end_ns,
        outcome=each.outcome,
        function="txn",
        intended=f"[{' '.join(intended)}]",
        result=f"[{' '.join(result)}]",
    )


def _poll(poll: Operation[Poll], written: set[str], last_ns: int) -> _Done:
    end_ns = last_ns if poll.completed_ns is None else poll.completed_ns
    records = [record for record in poll.what.records if record.topic in written]
    return _Done(
        actor=f"reader {poll.process}",
        begin_ns=end_ns if poll.invoked_ns is None else poll.invoked_ns,
        end_ns=end_ns,
        outcome=poll.phase,
        function="poll",
        intended="[[:poll]]",
        result=f"[[:poll {_by_partition(records)}]]",
    )


def _by_partition(records: Iterable[Record]) -> str:
    pairs: dict[str, list[str]] = defaultdict(list)
    for topic, partition, offset, key, value in records:
        pairs[f"{topic}-{partition}"].append(f"[{offset} {_value(key, value)}]")
    return "{" + ", ".join(f"{json.dumps(name)} [{' '.join(each)}]" for name, each in pairs.items()) + "}"


def _value(key: str | None, value: str) -> str:
    """Returns key and value as an EDN string; JSON's escapes are valid in EDN."""
    return json.dumps(value if key is None else f"{key}={value}")


def _in_log_order(sends: tuple[Send, ...], observed: Observed) -> list[Send]:
    """Returns the sends in log order; those of one key keep their order, and unread ones come last."""
    found = sorted(
        (send for send in sends if send.identity in observed.places),
        key=lambda send: observed.places[send.identity],
    )
    of_key: dict[tuple[str, str | None, int], deque[Send]] = defaultdict(deque)
    for send in sends:
        if send.identity in observed.places:
            of_key[_series(send, observed)].append(send)
    ordered = [send if send.key is None else of_key[_series(send, observed)].popleft() for send in found]
    return ordered + [send for send in sends if send.identity not in observed.places]


def _series(send: Send, observed: Observed) -> tuple[str, str | None, int]:
    return send.topic, send.key, observed.places[send.identity][1]


@click.command(name="edn")
@click.argument("paths", metavar="HISTORY...", nargs=-1, required=True, type=click.Path(exists=True))
def main(paths: tuple[str, ...]) -> None:
    """Write the history in these files as EDN, for Jepsen's checker."""
    for line in edn(read_history(map(Path, paths))):
        click.echo(line)


if __name__ == "__main__":
    main()
