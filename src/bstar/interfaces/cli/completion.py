"""`bstar completion`: the script that makes a shell complete `bstar`."""

from __future__ import annotations

import click

_EPILOG = """\b
Examples:
  eval "$(bstar completion bash)"                       # in ~/.bashrc
  eval "$(bstar completion zsh)"                        # in ~/.zshrc
  bstar completion fish > ~/.config/fish/completions/bstar.fish
"""


@click.command("completion", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import get_completion_class

    from bstar.interfaces.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None  # click ships these three
    # source() would run bash to check its version; the template alone needs no bash here.
    maker = found(cli, {}, "bstar", "_BSTAR_COMPLETE")
    click.echo(maker.source_template % maker.source_vars())
