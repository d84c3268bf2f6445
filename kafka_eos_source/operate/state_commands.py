"""The commands ``kafka-eos state list``, ``get``, ``restore``, ``verify``, ``rescale`` and ``lower-time``."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.operate.json_documents import PROGRESS, document, print_document
from kafka_eos_source.operate.shared import (
    CONNECTION,
    OPTIONAL_QUERY,
    REQUIRED_QUERY,
    YES,
    ExitCode,
    console,
    deadline_of,
    open_reader,
    require_brokers,
    require_option,
    table_of,
    target_of,
    with_options,
)
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.commands import JSON, json_text

if TYPE_CHECKING:
    from rich.console import Console

    from kafka_eos_source.operate.rescale_copy import Progress
    from kafka_eos_source.operate.shared import Target
    from kafka_eos_source.operate.stores import ChangelogShard, LocalShard, RestoredShard, Verified
    from kafka_eos_source.state.reading.stores import Changelog

_STORE = click.option("--store", metavar="NAME", help="Name of the operator's state store.")
_STATE_DIR = click.option(
    "--state-dir", metavar="DIR", help="The operator's option state.dir, on this machine."
)
_SNAPSHOTS = click.option(
    "--snapshot-location",
    metavar="URI",
    help="The operator's option state.snapshot.location: begin with the newest snapshot of each shard, and "
    "read only the rest of its changelog.",
)


@click.group()
def state() -> None:
    """Inspect, restore, verify, rescale and repair state.

    State is what the stateful operators of a query keep: databases on the executors, changelogs in Kafka.
    """


@state.command("list")
@with_options(OPTIONAL_QUERY, _STATE_DIR, _STORE, *CONNECTION, JSON)
def list_state(state_dir: str | None, store: str | None, as_json: bool, timeout: str, **options: Any) -> None:
    """List state databases on this machine and changelogs in Kafka.

    Databases, with --state-dir: the batch whose state they contain, their changelog offset, and pending
    batches. Changelogs, with QUERY (an application.id): the ends of each log, the committed offset and its
    batch. With both, Kafka is asked only if brokers are named.
    """
    from kafka_eos_source.operate import stores

    if state_dir is None and options["application_id"] is None:
        raise click.UsageError("name what to list: QUERY (an application.id), --state-dir, or both.")
    target = target_of(options, needs_kafka=state_dir is None)
    local = [] if state_dir is None else stores.local_shards(state_dir, target.application_id, store)
    changelogs: list[ChangelogShard] = []
    application_id = ""
    with open_reader(target) as reader:
        if reader is not None and target.application_id is not None:
            application_id = target.application_id
            changelogs = stores.changelog_shards(
                reader, group_of(application_id, target.group_id), application_id, store, deadline_of(timeout)
            )
    if as_json:
        print_document("state list", local=local, changelogs=changelogs)
        return
    out = console()
    if state_dir is not None:
        show_local(out, state_dir, local)
    if application_id:
        show_changelogs(out, application_id, changelogs)


@state.command("get")
@REQUIRED_QUERY
@click.argument("key", nargs=-1)
@with_options(_STATE_DIR, _STORE, _SNAPSHOTS, *CONNECTION, JSON)
@click.option("--variable", metavar="NAME", help="State variable to read, if the store has several.")
@click.option("--timers", is_flag=True, help="Show registered timers instead of a state variable.")
@click.option("--prefix", metavar="TEXT", help="Show rows whose first key column begins with TEXT.")
@click.option("--limit", default=20, show_default=True, help="Maximum number of rows; 0 = all.")
def get(
    key: tuple[str, ...],
    state_dir: str | None,
    store: str | None,
    snapshot_location: str | None,
    variable: str | None,
    timers: bool,
    prefix: str | None,
    limit: int,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Show rows of a store: of one KEY, of a prefix, or the first ones.

    QUERY is the application.id, KEY one value for each grouping column. The command reads the changelog in
    Kafka, or the databases in --state-dir; with --state-dir and brokers, it reads the databases as of the
    batch that Kafka holds. It takes no locks, so the query may run.
    """
    from kafka_eos_source.operate.stores import selected_rows
    from kafka_eos_source.state.reading.query import StateQuery

    target = target_of(options, needs_kafka=state_dir is None)
    with (
        _snapshots_explained(snapshot_location, as_json=as_json),
        StateQuery(
            target.application_id,
            store,
            state_dir=state_dir,
            kafka=_query_options(target),
            snapshot_location=snapshot_location,
            timeout_ms=int(1000 * deadline_of(timeout).budget_seconds),
        ) as query,
    ):
        found = selected_rows(query, key, prefix, variable, timers=timers)
        shown = list(islice(found, limit)) if limit else list(found)
        more = next(found, None) is not None
        if as_json:
            for row in shown:
                click.echo(row_json(row))
        else:
            batch = "no batch" if query.batch_id is None else f"batch {query.batch_id}"
            show_rows(console(), f"{query.store}, {batch}", shown)
        if more:
            click.echo(f"There are more than {limit} rows; --limit 0 shows all.", err=True)


@state.command("restore")
@with_options(REQUIRED_QUERY, _STATE_DIR, _STORE, _SNAPSHOTS, *CONNECTION, YES, JSON)
@click.option(
    "--shard",
    "only",
    type=int,
    multiple=True,
    help="Restore only the shard with this number; may be repeated.",
)
def restore(
    state_dir: str | None,
    store: str | None,
    snapshot_location: str | None,
    only: tuple[int, ...],
    yes: bool,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Restore the databases in --state-dir to what Kafka holds.

    Stop the query first. Its tasks restore their databases themselves; use this command to prepare a machine
    in advance. With --snapshot-location, a database that is missing or far behind begins with a snapshot.
    """
    from kafka_eos_source.operate import stores

    deadline = deadline_of(timeout)
    changelog = _changelog(options, store, snapshot_location)
    root = require_option("--state-dir", state_dir)
    cut = changelog.cut(deadline)
    shards = _shards(only, cut.shards)
    if not yes and not as_json:
        for shard in shards:
            batch = cut.batches[shard]
            click.echo(
                f"shard {shard}: {'no committed batch' if batch is None else f'batch {batch.batch_id}'}, "
                f"changelog up to offset {cut.ends[shard]}"
            )
        click.echo(
            f"With --yes: the command restores the databases of {cut.application_id}/{cut.store} in {root} "
            "to these batches."
        )
    out = console()
    restored = []
    with _snapshots_explained(snapshot_location, as_json=as_json):
        for each in stores.restore_shards(root, changelog, cut, shards, deadline) if yes else ():
            restored.append(each)
            if not as_json:
                show_restored(out, each)
    if as_json:
        batches = {shard: cut.batches[shard] for shard in shards}
        wanted = [
            {"shard": shard, "batch": batch and batch.batch_id, "offset": cut.ends[shard]}
            for shard, batch in batches.items()
        ]
        print_document("state restore", cut, shards=wanted, restored=restored)


@state.command("verify")
@with_options(REQUIRED_QUERY, _STATE_DIR, _STORE, *CONNECTION, JSON)
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    state_dir: str | None,
    store: str | None,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Compare the databases in --state-dir with their changelog.

    Only reads, so the query may run. Restores each shard into a temporary folder, which needs as much space
    as its database.

    Exit code: 0 = identical; 3 = different.
    """
    from kafka_eos_source.operate import stores
    from kafka_eos_source.state.reading.stores import folders

    changelog = _changelog(options, store)
    root = require_option("--state-dir", state_dir)
    out = console()
    verified = []
    found = folders(root, changelog.application_id, changelog.store)
    for each in stores.verify(found, changelog, deadline_of(timeout)):
        verified.append(each)
        if not as_json:
            show_verified(out, each)
    if as_json:
        print_document("state verify", verified)
    if any(each.differing for each in verified):
        if not as_json:
            out.print(
                "  Fix: stop the query, delete the folders of these shards and start the query. It restores "
                "them."
            )
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@state.command("rescale")
@with_options(REQUIRED_QUERY, _STORE)
@click.option("--shards", type=click.IntRange(1), required=True, help="New number of shards.")
@with_options(*CONNECTION, YES, JSON)
def rescale(shards: int, store: str | None, yes: bool, as_json: bool, timeout: str, **options: Any) -> None:
    """Move the state of a stopped query to another number of shards.

    The command copies the changelog, deletes it, creates it again with the new number of partitions, and
    fills it from the copy, in many short transactions. If the command is killed, run it again: it continues
    after its last transaction. Until it has finished, the query refuses to run. Then start the query with the
    new number of shards; they restore themselves.

    With --json, the progress goes to standard error, one line of JSON after each transaction.
    """
    from kafka_eos_source.operate.rescale import Rescale, copy_name
    from kafka_eos_source.state.changelog.move import Stage

    deadline = deadline_of(timeout)
    target = target_of(options)
    application_id = _application_id(target)
    name = require_option("--store", store)
    steps: list[str] = []
    progress: dict[str, Progress] = {}

    def show(now: Progress) -> None:
        progress[now.stage] = now
        click.echo(json.dumps(document(PROGRESS, now)) if as_json else str(now), err=as_json)

    move = Rescale(
        require_brokers(target),
        application_id,
        name,
        group_of(application_id, target.group_id),
        shards,
        timeout_ms=int(1000 * deadline.budget_seconds),
        report=steps.append if as_json else click.echo,
        show=show,
    )
    stage = move.stage()
    moves = yes and stage is not Stage.DONE
    if moves:
        move.run()
    if as_json:
        left = Stage.DONE if moves else stage
        print_document(
            "state rescale",
            application_id=application_id,
            store=name,
            shards=shards,
            next_stage=left.value,
            moved=moves,
            steps=steps,
            progress=progress.values(),
        )
    elif moves:
        click.echo(f"The state of store {name!r} has {shards} shards now. Start the query with this number.")
    elif stage is Stage.DONE:
        click.echo(f"The state of store {name!r} has {shards} shards already.")
    else:
        begun = "" if stage is Stage.COPY else f" The move has begun; its next stage is {stage.value!r}."
        click.echo(
            f"With --yes: the command copies the state of {application_id}/{name} to topic "
            f"{copy_name(application_id, name)}, deletes its changelog, creates it again with {shards} "
            f"partition(s) and fills it. Stop the query first.{begun}"
        )


@state.command("lower-time")
@with_options(REQUIRED_QUERY, _STORE, *CONNECTION, YES, JSON)
def lower_time(store: str | None, yes: bool, as_json: bool, timeout: str, **options: Any) -> None:
    """Lower recorded processing times that are in the future.

    Stop the query first, and check the clock of this machine: the command lowers the times to its time. Use
    it after a clock was wrong for a while, so that timers fire again. Timers and other entries that the state
    got with the wrong time keep it.
    """
    from kafka_eos_source.observe import wording
    from kafka_eos_source.operate.stores import find_future_shards, lower_times

    deadline, target = deadline_of(timeout), target_of(options)
    application_id, name = _application_id(target), require_option("--store", store)
    now_ms = time.time_ns() // 1_000_000
    change = lower_times if yes else find_future_shards
    group_id = group_of(application_id, target.group_id)
    shards = change(require_brokers(target), application_id, name, group_id, now_ms, deadline)
    if as_json:
        print_document(
            "state lower-time",
            application_id=application_id,
            store=name,
            time_ms=now_ms,
            lowered=yes and bool(shards),
            shards=shards,
        )
        return

    for each in shards:
        was = wording.utc(each.was_ms)
        click.echo(f"shard {each.shard}: the recorded time {was} is {(each.was_ms - now_ms) // 1000} s ahead")
    now = wording.utc(now_ms)
    if not shards:
        click.echo(f"No recorded time of store {name!r} is later than {now}.")
    elif yes:
        click.echo(f"The recorded times are {now} now. Start the query.")
    else:
        click.echo(f"With --yes: the command lowers these times to {now}. Stop the query first.")


def _changelog(
    options: Mapping[str, Any], store: str | None, snapshot_location: str | None = None
) -> Changelog:
    from kafka_eos_source.kafka.config import admin_config
    from kafka_eos_source.runtime.file_systems import file_system
    from kafka_eos_source.state.reading.stores import Changelog

    if snapshot_location is not None:
        file_system(snapshot_location)
    target = target_of(dict(options))
    application_id = _application_id(target)
    return Changelog(
        application_id,
        require_option("--store", store),
        group_of(application_id, target.group_id),
        admin_config(require_brokers(target)),
        snapshot_location,
    )


@contextmanager
def _snapshots_explained(location: str | None, *, as_json: bool) -> Iterator[None]:
    """Shows on standard error which snapshots are used, and why others are not."""
    if location is None or as_json:
        yield
        return
    handler = logging.StreamHandler()
    log = logging.getLogger("kafka_eos_source.state")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _query_options(target: Target) -> dict[str, str] | None:
    """Returns the ``kafka.*`` options for `StateQuery`; None if no brokers are set."""
    from kafka_eos_source.kafka.config import admin_config

    if target.kafka is None:
        return None
    group = {} if target.group_id is None else {"group.id": target.group_id}
    return {f"kafka.{name}": value for name, value in {**admin_config(target.kafka), **group}.items()}


def _application_id(target: Target) -> str:
    assert target.application_id is not None, "the argument QUERY is required"
    return target.application_id


def _shards(only: tuple[int, ...], shards: int) -> list[int]:
    wrong = [each for each in only if not 0 <= each < shards]
    if wrong:
        raise InvalidOptionError(
            f"--shard {wrong[0]} does not exist: the store has {shards} shards.",
            fix=f"use 0 to {shards - 1}.",
        )
    return sorted(set(only)) or list(range(shards))


# -- what the commands print


def show_local(out: Console, root: str, shards: Sequence[LocalShard]) -> None:
    """Prints the databases in a state directory."""
    table = table_of(
        root, "application.id", "store", ">shard", ">of", ">batch", ">offset", ">pending", ">bytes"
    )
    for each in shards:
        own = each.identity
        table.add_row(
            each.folder.application_id,
            each.folder.store,
            str(each.folder.shard),
            _or(own and own.shards),
            _or(each.batch and each.batch.batch_id),
            _or(each.next_offset),
            ", ".join(map(str, each.pending)),
            f"{each.size_bytes:,}",
            style="red" if each.problem else None,
        )
    out.print(table if shards else f"The folder {root!r} contains no state.")
    for each in shards:
        if each.problem:
            out.print(f"{each.folder.path}: {each.problem}")


def show_changelogs(out: Console, application_id: str, shards: Sequence[ChangelogShard]) -> None:
    """Prints the changelogs of a query."""
    columns = ("store", "partition", ">log from", ">stable", ">log to", ">committed", ">lag", ">batch")
    table = table_of(f"changelogs of {application_id}", *columns)
    for each in shards:
        table.add_row(
            each.store,
            str(each.tp),
            str(each.log.earliest),
            str(each.log.stable),
            str(each.log.end),
            _or(each.committed),
            str(each.lag),
            _or(each.token and each.token.batch_id),
            style="yellow" if each.log.stable < each.log.end else None,
        )
    out.print(table if shards else f"Kafka has no topic named {application_id}-…-changelog.")
    for problem in dict.fromkeys(each.problem for each in shards if each.problem):
        out.print(problem)


def show_rows(out: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows of a store, with a column for each field of key and value."""
    from kafka_eos_source.state.reading.live import flat, text

    found = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in found for name in row))
    table = table_of(title, *names)
    for row in found:
        table.add_row(*(text(row.get(name)) for name in names))
    out.print(table)


def row_json(row: Mapping[str, Any]) -> str:
    """Returns a row of a store as JSON on one line."""
    from kafka_eos_source.state.reading.live import text

    return json_text(row, default=text)


def show_restored(out: Console, each: RestoredShard) -> None:
    """Prints one restored shard."""
    how = "promoted its pending batch" if each.promoted else f"read {each.records:,} records"
    rate = f", {each.records / each.ms * 1000:,.0f} per second" if each.records and each.ms else ""
    at = each.snapshot_offset
    began = "" if at is None else f"began with the snapshot at changelog offset {at}, "
    wiped = f"; discarded the old database ({each.wiped})" if each.wiped else ""
    out.print(f"shard {each.shard}: at batch {each.batch_id}, {began}{how}{rate}{wiped}")


def show_verified(out: Console, each: Verified) -> None:
    """Prints the result of one compared shard."""
    batch = "no batch" if each.batch_id is None else f"batch {each.batch_id}"
    result = "identical" if not each.differing else f"{each.differing:,} keys differ"
    out.print(
        f"shard {each.shard}: {batch}, offset {each.end}, {each.entries:,} entries: {result}",
        style="red" if each.differing else None,
    )
    for one in each.differences:
        out.print(f"  {one.kind.value}: {one.key.hex()}")
    if each.differing > len(each.differences):
        out.print(f"  … and {each.differing - len(each.differences):,} more")


def _or(value: object) -> str:
    return "" if value is None else str(value)
