"""The `bstar` command: a lazy group (a command's module is imported when it runs) and the exit codes.

    0 answered · 1 well posed, no feasible answer · 2 bad input · 130 interrupted · 141 the reader went away
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from bstar.errors import BstarError

# name -> (module, attribute, one line for `bstar --help`); the order is the order of a first session.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "model": ("model", "model", "What a model is: parameters, weight bytes, KV bytes per token, layers by kind."),
    "memory": ("memory", "memory", "What fits: weights, activations, KV cache, blocks, maximum concurrency."),
    "explain": ("explain", "explain", "The physics sheet: every landmark and time with its formula."),
    "curve": ("curve", "curve", "The batch curve: step time and throughput from batch 1 to beyond memory."),
    "plan": ("plan", "plan", "How many GPUs, which, split how, at what cost, for a load and an SLO."),
    "simulate": ("simulate", "simulate", "What users would feel under a load: every request through the scheduler."),
    "validate": ("validate", "validate", "How right the predictions are: measured points replayed, errors, charts."),
    "bench": ("bench", "bench", "Measure a real server under a load: streams, honest clocks, failures counted."),
    "compare": ("compare", "compare", "Runs side by side: measured, simulated, or written by another tool."),
    "calibrate": ("calibrate", "calibrate", "A profile from measured runs: constants of your own server."),
    "tune": ("tune", "tune", "Which max_num_seqs to set, found by measuring a server."),
    "diagnose": ("diagnose", "diagnose", "Which wall a running server stands at, and what would move it."),
    "catalog": ("catalog", "catalog", "The models, devices and engines that bstar knows, with sources."),
    "completion": ("completion", "completion", "Print a shell completion script (bash, zsh, fish)."),
}

_EPILOG = """\b
Start here:
  bstar model llama-3.1-8b
  bstar memory llama-3.1-8b --gpu h100-sxm-80gb
  bstar explain llama-3.1-8b --gpu h100-sxm-80gb --context 8192
  bstar plan llama-3.1-70b --gpu h100-sxm-80gb,h200-sxm-141gb --input 2000 --output 300 --rate 5 --slo tpot=40ms
"""


class LazyGroup(click.Group):
    """Loads a command's module when the command is asked for, and turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"bstar.interfaces.cli.{entry[0]}")
        command = getattr(module, entry[1])
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click makes it exit code 1, which means "no feasible answer" here
            _silence_stdout()
            ctx.exit(141)

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx is not None else error.format_message())
            code = 0
        except click.ClickException as error:
            code = _report(error.format_message(), error.exit_code if error.exit_code != 1 else 2)
        except BstarError as error:
            code = _report(str(error), error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            code = 130
        except BrokenPipeError:
            _silence_stdout()
            code = 141
        except OSError as error:  # of the output only: bstar's own readers turn theirs into a BstarError
            if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
                raise
            _silence_stdout()
            code = _report(f"the output cannot be written ({error.strerror}); choose another place for it", 2)
        sys.exit(code if isinstance(code, int) else 0)


def _report(message: str, code: int) -> int:
    click.echo("error: " + " ".join(message.split()), err=True)
    return code


def _silence_stdout() -> None:
    """The reader closed the pipe: keep the interpreter from complaining when it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import bstar

        click.echo(f"bstar {bstar.__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, epilog=_EPILOG,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version and exit.")
def cli() -> None:
    """Capacity planner for LLM serving: what fits, what users feel, what to set, how many GPUs, at what cost.

    MODEL is a catalog name, a Hub id, a config.json, a model folder or a .gguf file; nothing here needs a GPU
    or a network. Every command takes --json: JSON on stdout and nothing else.
    """


def main() -> None:
    """Entry point of the console script."""
    cli.main(prog_name="bstar")


if __name__ == "__main__":
    main()
