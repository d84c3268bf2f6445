"""``kafka-eos completion``: the script with which a shell completes commands, options and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kafka_eos_source.runtime.commands import JSON, print_json

#: The lines that install the script, by shell.
INSTALL = {
    "bash": 'add  eval "$(kafka-eos completion bash)"  to ~/.bashrc',
    "zsh": 'add  eval "$(kafka-eos completion zsh)"  to ~/.zshrc, after compinit',
    "fish": "kafka-eos completion fish > ~/.config/fish/completions/kafka-eos.fish",
}
_PROGRAM = "kafka-eos"
#: The variable by which the shell asks the program for words; click derives the same name.
_VARIABLE = "_KAFKA_EOS_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(list(INSTALL)))
@JSON
@click.pass_context
def completion(ctx: click.Context, /, shell: str, as_json: bool) -> None:
    r"""Print the script that completes commands in a shell.

    Supported are bash (4.4 or newer), zsh and fish.

    \b
    bash: add  eval "$(kafka-eos completion bash)"  to ~/.bashrc
    zsh:  add  eval "$(kafka-eos completion zsh)"  to ~/.zshrc, after compinit
    fish: kafka-eos completion fish > ~/.config/fish/completions/kafka-eos.fish
    """
    script = script_of(shell, ctx.find_root().command)
    if as_json:
        print_json({"shell": shell, "script": script, "install": INSTALL[shell]})
    else:
        click.echo(script)


def script_of(shell: str, command: click.Command) -> str:
    """Returns the completion script for a shell; it asks the program itself for words."""
    found = get_completion_class(shell)
    assert found is not None, f"click completes in {shell}"
    # click's source() of bash also runs bash to check its version; the shell that reads the script may be
    # another one, so the version is documented instead
    made = found(command, {}, _PROGRAM, _VARIABLE)
    return made.source_template % made.source_vars()
