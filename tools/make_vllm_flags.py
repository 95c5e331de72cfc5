"""Write src/bstar/codec/data/vllm_flags.json: every `vllm serve` flag of the installed vLLM, with its arity.

    VLLM_VENV/bin/python tools/make_vllm_flags.py > src/bstar/codec/data/vllm_flags.json

Names, arity and value kind only; help texts stay in the engine. bstar needs the arity of flags that it does
not model, so that it can tell a flag's value from the model's name.
"""

import argparse
import json
import sys

import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def kind_of(action: argparse.Action) -> str:
    """ "switch" takes nothing · "boolean" has a --no- twin · "list" takes several · "optional" may · "value" one."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean"
    if action.nargs == 0:
        return "switch"
    if action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1):
        return "list"
    return "optional" if action.nargs == "?" else "value"


def main() -> None:
    """Print the table as JSON, one flag a line."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    flags = {}
    for action in parser._actions:
        names = [n for n in action.option_strings if n.startswith("-")]
        if not names or action.dest == "help":
            continue
        kind = kind_of(action)
        positive = [n for n in names if not (kind == "boolean" and n.startswith("--no-"))]
        value = getattr(action.type, "__name__", "str") if action.type else "str"
        known = {"int", "float", "human_readable_int", "human_readable_int_or_auto"}
        flags[action.dest] = {
            "names": positive, "kind": kind,
            "value": value if value in known else ("json" if "json" in value or "dict" in value else "str"),
        }
    lines = [f'    {json.dumps(k)}: {json.dumps(v)}' for k, v in sorted(flags.items())]
    sys.stdout.write(
        '{\n  "engine": "vllm",\n  "version": ' + json.dumps(vllm.__version__)
        + ',\n  "source": "vllm.entrypoints.launchers.cli_args.make_arg_parser of the installed release",\n'
        + '  "flags": {\n' + ",\n".join(lines) + "\n  }\n}\n")


main()
