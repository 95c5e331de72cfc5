"""The memory budget against start-up logs, and what must hold for any deployment."""

from __future__ import annotations

import statistics

import memory_points
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_points import Point, load_points

from bstar.codec.build import build_deployment
from bstar.physics.memory import MemoryBudget, memory_budget
from bstar.units import GIB

# Rows whose KV space is set by something that neither the row nor the engine's defaults state.
OUTSIDE = {"mp107": "KV offloading (LMCache) takes memory of its own"}


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return load_points()


def judged(points: list[Point]) -> list[Point]:
    """vLLM 0.11 and later, model, GPU and utilization stated, and it started."""
    return [p for p in points if p.budget is not None and p.version >= (0, 11) and p.row["outcome"] == "ok"
            and p.row["gpu_mem_util"]]


def table(rows: list[tuple[str, float]]) -> str:
    return "\n".join(f"{name:10s} {error:+7.2%}" for name, error in sorted(rows, key=lambda r: abs(r[1]))[-8:])


def test_weights_within_two_percent(points: list[Point]) -> None:
    errors = [(p.id, e) for p in points if p.version >= (0, 11) and (e := p.weight_error()) is not None]
    print(f"\nweights: {len(errors)} rows, worst:\n{table(errors)}")
    assert len(errors) >= 25
    assert max(abs(e) for _, e in errors) <= 0.02


def test_kv_space_median_and_tail(points: list[Point]) -> None:
    errors = [(p.id, e) for p in judged(points) if (e := p.kv_error()) is not None]
    sizes = sorted(abs(e) for _, e in errors)
    median, tail = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    print(f"\nKV space: {len(errors)} rows, median {median:.2%}, 90th percentile {tail:.2%}, worst:\n{table(errors)}")
    assert len(errors) >= 30
    assert median <= 0.01
    assert tail <= 0.10


def test_concurrency_follows_the_kv_space(points: list[Point]) -> None:
    """Given the logged KV space, blocks and concurrency have to come out as logged (rounded logs: 1 %)."""
    checked = 0
    for p in judged(points):
        measured, kv = p.number("max_concurrency"), p.kv_gib
        if measured is None or kv is None or p.budget is None or p.row["spec_decode"]:
            continue
        predicted = p.budget.max_concurrency * kv * GIB / p.budget.kv_cache_bytes
        if "qwen3." in p.row["model"].lower():
            continue  # hybrids with settings that the row does not state
        assert predicted == pytest.approx(measured, rel=0.01), p.id
        checked += 1
    assert checked >= 8


def test_what_failed_to_start_does_not_fit(points: list[Point]) -> None:
    """Of the failures that state model, GPU and max_model_len, all but one; each with the engine's reason."""
    failed = [p for p in points if p.budget is not None and p.version >= (0, 11)
              and p.row["outcome"].startswith("fail") and (p.row["max_model_len"] or p.row["max_num_seqs"])]
    missed = [p.id for p in failed if p.budget is not None and p.budget.fits]
    print(f"\nfailed to start: {len(failed)} rows, predicted to fit: {missed}")
    assert len(failed) >= 4
    assert len(missed) <= 1
    reasons = {p.id: p.budget.reason or "" for p in failed if p.budget is not None}
    assert "no available memory for the cache blocks" in reasons["mp009"]
    assert "max_model_len 32000 needs 7.81 GiB" in reasons["mp010"]
    assert "max_num_seqs 1024 exceeds" in reasons["mp099"]


def test_what_ran_fits(points: list[Point]) -> None:
    ran = [p for p in points if p.budget is not None and p.row["outcome"] == "ok"]
    wrong = [(p.id, p.budget.reason) for p in ran if p.budget is not None and not p.budget.fits]
    print(f"\nran: {len(ran)} rows, predicted not to fit: {wrong}")
    assert len(wrong) <= 0.05 * len(ran)


def test_outside_rows_are_still_rows(points: list[Point]) -> None:
    assert OUTSIDE.keys() <= {p.id for p in points}
    assert memory_points.POINTS.exists()


def budget(**kw: object) -> MemoryBudget:
    return memory_budget(build_deployment(**{"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", **kw}))  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 1.0), st.integers(8, 1024), st.integers(1024, 32768))
def test_the_parts_sum_to_what_the_engine_may_use(util: float, seqs: int, tokens: int) -> None:
    b = budget(gpu_memory_utilization=util, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    parts = b.weight_bytes + b.activation_bytes + b.runtime_bytes + b.kv_cache_bytes
    parts += b.cuda_graph_bytes if b.cuda_graphs_subtracted else 0
    assert parts == b.usable_bytes
    assert b.num_blocks * b.bytes_per_block <= max(b.kv_cache_bytes, 0)
    assert b.fits == (b.reason is None)


def test_more_memory_more_room_and_a_longer_model_len_never_more_requests() -> None:
    rooms = [budget(gpu_memory_utilization=u).kv_cache_bytes for u in (0.5, 0.7, 0.9)]
    assert rooms == sorted(rooms)
    requests = [budget(max_model_len=n).max_concurrency for n in (2048, 8192, 32768)]
    assert requests == sorted(requests, reverse=True)


def test_settings_that_name_the_kv_space_are_honoured() -> None:
    assert budget(kv_cache_memory_bytes=10 * GIB).kv_cache_bytes == 10 * GIB
    assert budget(num_gpu_blocks_override=1000).num_blocks == 1000
    assert not budget(num_gpu_blocks_override=10, max_model_len=8192).fits


def test_a_model_that_is_too_large_says_so() -> None:
    b = budget(model="meta-llama/Llama-3.1-405B")
    assert not b.fits and b.reason is not None and "weights alone take" in b.reason


@pytest.mark.parametrize(
    ("version", "tokens"),
    # gemma-4-31B AWQ on an A100-80: the same ~50 GiB of KV were logged as ~55k tokens by 0.20.0 and ~525k by 0.21.0.
    [("0.20.0", 55_000), ("0.21.0", 525_000)],
)
def test_logged_tokens_depend_on_the_version(version: str, tokens: int) -> None:
    b = budget(model="google/gemma-4-31B-it", gpu="a100-sxm-80gb", weight_dtype="w4a16", engine=f"vllm@{version}",
               gpu_memory_utilization=0.9)
    assert b.kv_cache_bytes / GIB == pytest.approx(50, rel=0.03)
    assert b.kv_cache_tokens == pytest.approx(tokens, rel=0.15)


def test_hybrid_states_bound_max_num_seqs() -> None:
    """Qwen3.6-27B in bf16 on one 94 GB H100 under 0.25.1: 614 blocks, so 1,024 sequences are refused."""
    b = budget(model="Qwen/Qwen3.6-27B", gpu="h100-nvl-94gb", engine="vllm@0.25.1")
    assert b.num_blocks == pytest.approx(614, rel=0.02)
    assert b.reason is not None and "max_num_seqs 1024 exceeds" in b.reason
    assert budget(model="Qwen/Qwen3.6-27B", gpu="h100-nvl-94gb", engine="vllm@0.25.1", max_num_seqs=512).fits


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_other_engines_have_a_pool_too(engine: str) -> None:
    b = budget(engine=engine)
    assert b.fits and 0 < b.kv_cache_bytes < b.total_bytes
    assert b.kv_cache_tokens == pytest.approx(b.kv_cache_bytes / 131072, rel=0.01)


def test_the_json_contract() -> None:
    out = budget().to_dict()
    assert {"total_bytes", "weight_bytes", "activation_bytes", "runtime_bytes", "cuda_graph_bytes",
            "kv_cache_bytes"} <= out["per_gpu"].keys()
    assert {"kv_cache_tokens", "num_blocks", "max_concurrency", "fits", "reason"} <= out.keys()


# Hybrids whose log gives the KV space (2 decimals) and the concurrency: blocks, groups and states must come out.
@pytest.mark.parametrize(
    ("model", "kv_gib", "tokens", "kw"),
    [
        ("Qwen/Qwen3.6-27B", 11.05, 623_873, {"tp": 2, "num_speculative_tokens": 3, "max_model_len": 262144}),
        ("Qwen/Qwen3.6-27B", 9.84, 619_202, {"tp": 2, "max_model_len": 262144}),
        ("Qwen/Qwen3.6-35B-A3B", 5.98, 567_978, {"gpu": "rtx-5090", "max_model_len": 131072}),
        ("Qwen/Qwen3.6-35B-A3B", 6.01, 569_878, {"gpu": "rtx-5090", "max_model_len": 131072}),
    ],
)
def test_hybrid_logs(model: str, kv_gib: float, tokens: int, kw: dict[str, object]) -> None:
    b = budget(model=model, engine="vllm@0.24.0", kv_cache_dtype="fp8", enable_prefix_caching=True, max_num_seqs=2,
               kv_cache_memory_bytes=round(kv_gib * GIB), **{"gpu": "rtx-3090", **kw})
    assert b.kv_cache_tokens == pytest.approx(tokens, rel=0.004)


def test_sglang_and_vllm_leave_different_headroom_to_the_same_model() -> None:
    """Qwen3-235B-A22B-FP8 on 4 H100: 178,880 tokens by vLLM 0.9, 367,404 by SGLang at 0.93."""
    common = {"model": "Qwen/Qwen3-235B-A22B-FP8", "tp": 4, "max_model_len": 32768}
    vllm = budget(engine="vllm@0.9.2", **common)
    sglang = budget(engine="sglang", gpu_memory_utilization=0.93, **common)
    assert vllm.kv_cache_tokens == pytest.approx(178_880, rel=0.08)
    assert sglang.kv_cache_tokens == pytest.approx(367_404, rel=0.02)


def test_data_parallel_experts_of_minimax() -> None:
    """MiniMax-M2.5 NVFP4 DEP2 on B200 without the graph estimate: 769,888 tokens; with it, a note warns."""
    for version, warns in (("0.19.0", False), ("0.22.0", True)):
        b = budget(model="nvidia/MiniMax-M2.5-NVFP4", gpu="b200-sxm-180gb", dp=2, enable_expert_parallel=True,
                   engine=f"vllm@{version}")
        assert any("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS" in note for note in b.notes) == warns
        if not warns:
            assert b.kv_cache_tokens == pytest.approx(769_888, rel=0.03)


def test_the_graph_estimate_can_be_turned_off_as_in_the_engine() -> None:
    on, off = (budget(engine="vllm@0.22.0", estimate_cudagraph_memory=flag) for flag in (None, False))
    assert on.cuda_graphs_subtracted and not off.cuda_graphs_subtracted
    assert off.kv_cache_bytes - on.kv_cache_bytes == on.cuda_graph_bytes > 0


def test_a_cold_start_pays_for_the_compilers_copy_of_the_embedding_table() -> None:
    """Qwen3-8B on an RTX 4090, vLLM 0.27.1: 35,792 tokens on an empty compile cache, 43,040 on a filled one."""
    cold = budget(model="qwen3-8b", gpu="rtx-4090", engine="vllm@0.27.1", max_model_len=8192)
    assert cold.activation_set_by == "compile"
    assert cold.kv_cache_tokens == pytest.approx(35_792, rel=0.005)
    assert any("filled compile cache" in note for note in cold.notes)
    eager = budget(model="qwen3-8b", gpu="rtx-4090", engine="vllm@0.27.1", max_model_len=8192,
                   enforce_eager=True)
    before = budget(model="qwen3-8b", gpu="rtx-4090", engine="vllm@0.11.0", max_model_len=8192, max_num_seqs=8)
    assert eager.activation_set_by != "compile" and before.activation_set_by != "compile"
    assert eager.kv_cache_tokens == pytest.approx(43_040, rel=0.01)


@pytest.mark.parametrize(("version", "subtracted"), [
    ("0.19.0", False), ("0.20.0", True), ("0.22.0", True), ("0.24.0", False), ("0.28.0", False), ("0.29.0", True),
])  # fmt: skip
def test_graphs_are_subtracted_where_the_versions_model_runner_estimates_them(version: str, subtracted: bool) -> None:
    assert budget(engine=f"vllm@{version}").cuda_graphs_subtracted is subtracted
    experts = budget(model="qwen3-30b-a3b", engine=f"vllm@{version}")
    assert experts.cuda_graphs_subtracted is (version >= "0.20")


def test_the_experts_work_spaces_stay_while_the_sampler_runs() -> None:
    """Qwen3-30B-A3B on an H100, vLLM 0.19: 2.68 GiB, of which the sampler alone takes 2.1."""
    experts = budget(model="qwen3-30b-a3b", engine="vllm@0.19.0", max_model_len=8192)
    assert experts.activation_set_by == "sampler"
    assert 2.4 < experts.activation_bytes / GIB < 2.8


def test_held_out_logs_are_predicted() -> None:
    """No constant was fitted on most of these rows; what a row leaves open is kept out of the bound."""
    rows = [p for p in load_points(memory_points.HELD_OUT) if p.row["quality"] == "ok"]
    errors = sorted(abs(e) for p in rows if (e := p.kv_error()) is not None)
    assert len(errors) >= 30
    assert errors[len(errors) // 2] < 0.005 and errors[int(0.9 * len(errors))] < 0.04


def test_shared_indexers_had_caches_of_their_own_before_0_24() -> None:
    """GLM-5.2-FP8 on 8 GPUs, fp8 cache and MTP: 60.79 GiB per GPU for 1,048,576 tokens."""
    common = {"model": "zai-org/GLM-5.2-FP8", "gpu": "h200-sxm-141gb", "tp": 8, "kv_cache_dtype": "fp8",
              "max_model_len": 1_048_576, "num_speculative_tokens": 1}
    assert budget(engine="vllm@0.23.0", **common).needed_bytes / GIB == pytest.approx(60.79, abs=0.005)
    assert budget(engine="vllm@0.24.0", **common).needed_bytes / GIB < 54


@pytest.mark.parametrize(("given", "fits"), [
    ({"kv_cache_memory_bytes": 100 * 2**30}, False), ({"kv_cache_memory_bytes": 60 * 2**30}, True),
    ({"num_gpu_blocks_override": 100_000}, False), ({"num_gpu_blocks_override": 30_000}, True),
    ({"kv_cache_memory_bytes": 100 * 2**30, "engine": "trtllm"}, False),
])
def test_a_given_cache_needs_its_place(given: dict[str, object], fits: bool) -> None:
    found = budget(model="llama-3.1-8b", gpu="h100-sxm-80gb", **given)
    assert found.fits == fits
    if not fits:
        assert found.reason is not None and found.reason.startswith(next(iter(given)))


def test_a_cap_on_sglang_s_pool_only_lowers_it() -> None:
    whole = budget(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="sglang")
    for tokens in (10_000, 10_000_000):
        capped = budget(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine="sglang", num_gpu_blocks_override=tokens)
        assert capped.fits and capped.kv_cache_tokens == min(tokens, whole.kv_cache_tokens)
