"""``kafka-eos state ls | get | restore | verify | rescale``: options in, a report out. Changes need --yes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.commands import NEEDS_A_PERSON
from kafka_eos_source.operate.given import CONNECTION, YES, deadline_of, look_at, target_of, with_options

if TYPE_CHECKING:
    from kafka_eos_source.operate.target import Target
    from kafka_eos_source.state.reading.cut import Changelog

_APPLICATION = click.option("--application-id", metavar="ID", help="As the option application.id.")
_STORE = click.option("--store", metavar="NAME", help="Of the operator's state, as given to it.")
_STATE_DIR = click.option("--state-dir", metavar="DIR", help="As the operator's option state.dir, here.")


@click.group()
def state() -> None:
    """What stateful operators keep: look at it, restore it, compare it, move it to more shards."""


@state.command("ls")
@with_options(_STATE_DIR, _APPLICATION, _STORE, *CONNECTION)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_state(state_dir: str | None, store: str | None, as_json: bool, timeout: str, **given: Any) -> None:
    """Databases under --state-dir, and changelogs of --application-id in Kafka.

    Of a database: the batch whose state it is, the changelog offset that it holds, batches that are pending
    in it. Of a changelog: where its log ends, where it is committed and by which batch.
    """
    from kafka_eos_source.errors import InvalidOptionError
    from kafka_eos_source.operate import state_list, state_view, view

    target = target_of(given)
    if state_dir is None and target.kafka is None:
        raise InvalidOptionError(
            "nothing to look at.",
            fix="give --state-dir, or --application-id and --bootstrap-servers, or both.",
        )
    local = [] if state_dir is None else state_list.local(state_dir, target.application_id, store)
    changelogs: list[state_list.ChangelogShard] = []
    application_id = ""
    with look_at(target) as look:
        if look is not None:
            application_id = _application_id(target)
            changelogs = state_list.changelogs(
                look, target.group_id or application_id, application_id, store, deadline_of(timeout)
            )
    if as_json:
        click.echo(state_view.listing_json(local, changelogs))
        return
    out = view.console()
    if state_dir is not None:
        state_view.show_local(out, state_dir, local)
    if target.kafka is not None:
        state_view.show_changelogs(out, application_id, changelogs)


@state.command("get")
@click.argument("key", nargs=-1)
@with_options(_STATE_DIR, _APPLICATION, _STORE, *CONNECTION)
@click.option("--variable", metavar="NAME", help="State variable, where the store has several.")
@click.option("--timers", is_flag=True, help="Registered timers in place of a variable.")
@click.option("--prefix", metavar="TEXT", help="Rows whose first key column begins so, as text.")
@click.option("--limit", default=20, show_default=True, help="Most rows shown; 0 = all.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a row.")
def get(
    key: tuple[str, ...],
    state_dir: str | None,
    store: str | None,
    variable: str | None,
    timers: bool,
    prefix: str | None,
    limit: int,
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """The rows of a KEY (a value for each grouping column), of a prefix, or the first ones of all.

    Read from the databases of --state-dir, from the changelog in Kafka, or, with both, from the databases as
    of the batch that Kafka names. Nothing is locked: the query may run.
    """
    from itertools import islice

    from kafka_eos_source.operate import state_view, view
    from kafka_eos_source.operate.state_get import rows
    from kafka_eos_source.state.reading.query import StateQuery

    target = target_of(given)
    with StateQuery(
        target.application_id,
        store,
        state_dir=state_dir,
        kafka=_kafka(target),
        timeout_ms=int(1000 * deadline_of(timeout).budget_seconds),
    ) as asked:
        found = rows(asked, key, prefix, variable, timers=timers)
        shown = list(islice(found, limit)) if limit else list(found)
        more = next(found, None) is not None
        if as_json:
            for row in shown:
                click.echo(state_view.row_json(row))
        else:
            batch = "no batch" if asked.batch_id is None else f"batch {asked.batch_id}"
            state_view.show_rows(view.console(), f"{asked.store}, {batch}", shown)
        if more:
            click.echo(f"more than {limit} rows: --limit 0 shows all.", err=True)


@state.command("restore")
@with_options(_STATE_DIR, _APPLICATION, _STORE, *CONNECTION, YES)
@click.option("--shard", "only", type=int, multiple=True, help="Only this one; may be repeated.")
def restore(
    state_dir: str | None, store: str | None, only: tuple[int, ...], yes: bool, timeout: str, **given: Any
) -> None:
    """Brings the databases under --state-dir to what Kafka holds, while the query is stopped.

    Its tasks do that by themselves; this is for a machine that is made ready beforehand.
    """
    from kafka_eos_source.operate import state_restore, state_view, view

    deadline = deadline_of(timeout)
    changelog = _changelog(given, store)
    root = _required("--state-dir", state_dir)
    cut = changelog.cut(deadline)
    shards = _shards(only, cut.shards)
    if not yes:
        for shard in shards:
            batch = cut.batches[shard]
            click.echo(
                f"shard {shard}: {'no batch was committed' if batch is None else f'batch {batch.batch_id}'}, "
                f"changelog up to offset {cut.ends[shard]}"
            )
        click.echo(f"With --yes: {cut.application_id}/{cut.store} under {root} is brought there.")
        return
    out = view.console()
    for each in state_restore.bring(root, changelog, cut, shards, deadline):
        state_view.show_brought(out, each)


@state.command("verify")
@with_options(_STATE_DIR, _APPLICATION, _STORE, *CONNECTION)
@click.pass_context
def verify(
    ctx: click.Context, /, state_dir: str | None, store: str | None, timeout: str, **given: Any
) -> None:
    """Compares the databases under --state-dir with their changelog: keys, values, offset.

    Exit code 3 = they differ. The databases are only read; the query may run. Each shard is restored into a
    temporary folder, which takes the room of its database.
    """
    from kafka_eos_source.operate import state_verify, state_view, view
    from kafka_eos_source.state.reading.local import folders

    changelog = _changelog(given, store)
    root = _required("--state-dir", state_dir)
    out = view.console()
    differing = 0
    found = folders(root, changelog.application_id, changelog.store)
    for each in state_verify.verify(found, changelog, deadline_of(timeout)):
        state_view.show_verified(out, each)
        differing += each.differing
    if differing:
        out.print("  Fix: stop the query and remove the folders of these shards: they are restored.")
        ctx.exit(NEEDS_A_PERSON)


@state.command("rescale")
@with_options(_APPLICATION, _STORE)
@click.option("--shards", type=click.IntRange(1), required=True, help="How many there are to be.")
@with_options(*CONNECTION, YES)
def rescale(shards: int, store: str | None, yes: bool, timeout: str, **given: Any) -> None:
    """Moves the state of a stopped query to another number of shards, more or fewer.

    The changelog is made anew by way of a copy. Killed at any point, the same command goes on; until it comes
    to its end the query refuses to run. Start the query with the new number then: its shards restore
    themselves.
    """
    from kafka_eos_source.operate.rescale import Rescale, copy_name
    from kafka_eos_source.state.changelog.move import Stage

    deadline = deadline_of(timeout)
    target = target_of(given)
    application_id = _application_id(target)
    name = _required("--store", store)
    move = Rescale(
        _brokers(target),
        application_id,
        name,
        target.group_id or application_id,
        shards,
        timeout_ms=int(1000 * deadline.budget_seconds),
        say=click.echo,
    )
    stage = move.stage()
    if stage is Stage.DONE:
        click.echo(f"The state of store {name!r} has {shards} shards.")
        return
    if not yes:
        begun = "" if stage is Stage.COPY else f" It was begun: the next stage is {stage.value!r}."
        click.echo(
            f"With --yes: the state of {application_id}/{name} is copied to topic "
            f"{copy_name(application_id, name)}, its changelog is deleted and made anew with {shards} "
            f"partitions, and filled. Stop the query first.{begun}"
        )
        return
    move.run()
    click.echo(f"The state of store {name!r} has {shards} shards. Start the query with that number.")


def _changelog(given: Mapping[str, Any], store: str | None) -> Changelog:
    from kafka_eos_source.kafka.config import admin_config
    from kafka_eos_source.state.reading.cut import Changelog

    target = target_of(dict(given))
    application_id = _application_id(target)
    return Changelog(
        application_id,
        _required("--store", store),
        target.group_id or application_id,
        admin_config(_brokers(target)),
    )


def _kafka(target: Target) -> dict[str, str] | None:
    """As `StateQuery` takes it."""
    from kafka_eos_source.kafka.config import admin_config

    if target.kafka is None:
        return None
    group = {} if target.group_id is None else {"group.id": target.group_id}
    return {f"kafka.{name}": value for name, value in {**admin_config(target.kafka), **group}.items()}


def _brokers(target: Target) -> Mapping[str, str]:
    from kafka_eos_source.errors import InvalidOptionError

    if target.kafka is None:
        raise InvalidOptionError(
            "no brokers were named.", fix="give --bootstrap-servers, or --kafka-properties with them."
        )
    return target.kafka


def _application_id(target: Target) -> str:
    return _required("--application-id", target.application_id)


def _required(name: str, value: str | None) -> str:
    from kafka_eos_source.errors import InvalidOptionError

    if value is None:
        raise InvalidOptionError(f"{name} is missing.", fix=f"give {name}.")
    return value


def _shards(only: tuple[int, ...], shards: int) -> list[int]:
    from kafka_eos_source.errors import InvalidOptionError

    wrong = [each for each in only if not 0 <= each < shards]
    if wrong:
        raise InvalidOptionError(
            f"--shard {wrong[0]}: the store has {shards} shards (0 to {shards - 1}).", fix="correct it."
        )
    return sorted(set(only)) or list(range(shards))
