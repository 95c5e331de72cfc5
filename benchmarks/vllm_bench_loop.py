"""`vllm bench serve` again and again in one process, so that its imports are paid once. Runs in vLLM's environment.

    VENV/bin/python benchmarks/vllm_bench_loop.py      in: a JSON list of arguments a line; out: "@@" and its result
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve

    print("@@ready", flush=True)
    for line in sys.stdin:
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        with tempfile.TemporaryDirectory() as folder:
            arguments = [*json.loads(line), "--save-result", "--save-detailed", "--result-dir", folder,
                         "--result-filename", "result.json", "--disable-tqdm"]
            before = resource.getrusage(resource.RUSAGE_SELF)
            try:
                with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                    serve(parser.parse_args(arguments))
                found = json.loads((Path(folder) / "result.json").read_text())
            except (Exception, SystemExit) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            after = resource.getrusage(resource.RUSAGE_SELF)
            found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found.pop("generated_texts", None)
        print("@@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
