"""llama.cpp and plain transformers: defaults, layouts, how they schedule, what launches them."""

from __future__ import annotations

import pytest

import bstar
from bstar.catalog.devices import get_device
from bstar.catalog.engines import engine_defaults, engine_name, engine_scheduling
from bstar.codec.engine_command import format_command
from bstar.errors import SpecError
from bstar.latency import decode_step_time


def deployed(engine: str, **settings: object) -> bstar.Deployment:
    return bstar.deployment(model="llama-2-7b", gpu="a100-sxm-80gb", engine=engine, **settings)


def test_names_and_defaults() -> None:
    assert [engine_name(text) for text in ("llama.cpp", "llama-server", "HF", "transformers")] == [
        "llamacpp", "llamacpp", "transformers", "transformers"]
    device = get_device("a100-sxm-80gb")
    assert engine_defaults("llamacpp", "0.0.5000", device).max_num_seqs == 1
    assert engine_defaults("llamacpp", None, device).max_num_seqs == 4
    assert engine_defaults("transformers", None, device).cudagraph_max_size(1, 8192) == 0


@pytest.mark.parametrize("engine", ["llamacpp", "transformers"])
def test_layers_are_split_over_gpus_in_turn(engine: str) -> None:
    with pytest.raises(SpecError, match="--pp 2"):
        deployed(engine, tp=2)
    assert deployed(engine, pp=2).parallel.pp == 2


def test_python_launches_are_the_floor_of_a_small_batch() -> None:
    """Llama-2-7B in transformers takes 22 to 28 ms a token on A100, several times the floor; llama.cpp does not."""
    slow, fast = (decode_step_time(deployed(e), 1, 512) for e in ("transformers", "llamacpp"))
    assert 0.020 < slow.expected_s < 0.030 and slow.floor_s == fast.floor_s
    assert fast.expected_s < 2.0 * fast.floor_s


def test_plain_generation_is_static_batching() -> None:
    assert (engine_scheduling("transformers"), engine_scheduling("llamacpp")) == ("static", "continuous")
    load = bstar.traffic.closed_loop(4, "uniform:10-400", "uniform:10-400", 16, seed=1)
    static = bstar.simulate(deployed("transformers", max_num_seqs=4), load)
    assert static.policy == "static" and static.summary.tpot_s.count == 16


def test_launch_commands() -> None:
    command = format_command(deployed("llamacpp", max_num_seqs=8, max_model_len=4096))
    assert command.startswith("llama-server ") and "-np 8 -c 32768" in command
    assert format_command(deployed("transformers")).startswith("#")
