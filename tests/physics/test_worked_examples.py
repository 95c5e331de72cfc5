"""Every number of the two sources, recomputed through the public functions from the inputs the table states.

The table (tests/data/worked_examples.csv, from the project's worked numbers) names a quantity and its inputs
in words; the parser below reads the inputs and picks the function by the quantity. No result is stored here.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bstar.physics import landmarks as lm
from bstar.physics import prefill, roofline
from bstar.physics.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token
from bstar.physics.weights import expected_distinct_experts
from bstar.specs.attention import GroupedQueryAttention
from bstar.specs.ffn import NoFfn
from bstar.specs.formats import kv_format, tensor_format
from bstar.specs.model import LayerGroup, ModelSpec
from bstar.specs.tensors import WeightTensor
from bstar.units import parse_bytes

TABLE = Path(__file__).parents[1] / "data" / "worked_examples.csv"
ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
GQA_8B, MHA_8B, GQA_70B, MHA_70B, MHA_13B = (32, 8), (32, 32), (80, 8), (80, 64), (40, 40)
MODELS = {  # words of the table -> (layers, KV heads); head_dim is 128 in all of them
    "8b-gqa": GQA_8B, "8b-mha": MHA_8B, "70b-mha": MHA_70B, "llama-3-8b gqa": GQA_8B, "llama-2-13b mha": MHA_13B,
    "llama-3-8b": GQA_8B, "bmem-8b": GQA_8B, "bmem-70b": GQA_70B,
}  # fmt: skip
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def attention_only(layers: int, kv_heads: int, head_dim: int = 128) -> ModelSpec:
    """A model of nothing but attention layers: what its KV cache is about."""
    mixer = GroupedQueryAttention(num_heads=64, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    table = (WeightTensor(name="embedding", role="embedding", rows=64, columns=64, matmul=False),)
    return ModelSpec(
        name="kv", architecture="test", hidden_size=64, vocab_size=64, max_context_tokens=1 << 20, embedding=table,
        lm_head=(), tied=True, layers=(LayerGroup(indices=tuple(range(layers)), mixer=mixer, ffn=NoFfn()),),
    )  # fmt: skip


def model_in(text: str) -> ModelSpec | None:
    """The model that the inputs name."""
    low = text.lower()
    word = next((w for w in sorted(MODELS, key=len, reverse=True) if w in low), None)
    return attention_only(*MODELS[word]) if word else None


def number(text: str) -> float:
    """"4x80e9", "312e12/1.94e12", "4 GiB", "10/s", "0.020 s", "16e9"."""
    text = text.strip().rstrip(",")
    if re.fullmatch(r"[\d.e]+/[\d.e]+", text):
        top, bottom = text.split("/")
        return float(top) / float(bottom)
    if re.fullmatch(r"[\d.e]+x[\d.e]+", text):
        count, each = text.split("x")
        return float(count) * float(each)
    if text.endswith("iB"):
        return float(parse_bytes(text))
    found = NUMBER.match(text)
    assert found is not None, text
    return float(found.group())


def parse(text: str, row_id: str = "") -> dict[str, float]:
    """key=value inputs, and kv bytes of the model that the inputs (or only the row's name) speak of."""
    out: dict[str, float] = {}
    for key, value in re.findall(r"(\w+)\s*=\s*([\d.][\d.exX/]*(?: GiB)?)", text):
        out[key] = number(value)
    model, tokens = model_in(text) or model_in(row_id), out.get("L", out.get("context"))
    if "kv_token" in out:
        out["kv"] = out["kv_token"] * out["context"]
    elif "kv" in out and re.search(r"kv=\d+ tokens", text):
        out["kv"] = kv_of(attention_only(*MHA_8B), out["kv"])
    elif model is not None and tokens is not None:
        out["kv"] = kv_of(model, tokens)
    return out


def kv_of(model: ModelSpec, tokens: float) -> float:
    return float(kv_bytes_per_sequence(model, kv_format("bf16"), tokens))


def numbers(text: str) -> list[float]:
    return [float(n) for n in NUMBER.findall(text)]


def by_id(row_id: str) -> float:
    """The recomputed value of another row ("the above", "at the B above")."""
    return compute(next(r for r in ROWS if r["id"] == row_id))


def per_token(row: dict[str, str]) -> float:
    i = parse(row["inputs"])
    model = attention_only(int(i["layers"]), int(i["heads"] if "heads" in i else i["kv_heads"]), int(i["head_dim"]))
    return kv_bytes_per_token(model, kv_format({2: "bf16", 1: "fp8"}[int(i["bytes"])]))


def pool(i: dict[str, float]) -> float:
    return i["kv_pool"] if "kv_pool" in i else i["vram"] * i["util"] - i["W"]


def step(row: dict[str, str]) -> float:
    if row["inputs"] == "at the B above":
        source = parse(next(r for r in ROWS if r["id"] == "in-flight-8b-2000-10rps")["inputs"])
        return float(lm.step_time_floor_s(
            source["W"], by_id("in-flight-8b-2000-10rps") * source["kv"], source["bandwidth"]))
    i = parse(row["inputs"])
    return float(lm.step_time_floor_s(i["W"], i.get("B", 1.0) * i["kv"], i["bandwidth"]))


def amortized_at_b_star(_: dict[str, str]) -> float:
    weights, kv, bandwidth = 16e9, 67e6, 2e12
    return float(
        lm.amortized_time_s(lm.b_star(weights, kv), weights, kv, bandwidth) / lm.amortized_limit_s(kv, bandwidth))


def ceiling(row: dict[str, str]) -> float:
    source = parse(next(r for r in ROWS if r["id"] == "in-flight-8b-2000-10rps")["inputs"])
    step_ms, tokens, step_s = numbers(row["inputs"])
    assert step_ms / 1000 == step_s
    return float(lm.max_request_rate(
        lm.batch_at_step_time(step_s, source["W"], source["kv"], source["bandwidth"]), tokens, step_s))


def equal_context(row: dict[str, str]) -> float:
    four, layers, heads, head_dim, two, half, _, parameters = numbers(row["inputs"])
    assert (four, two, half) == (4, 2, 2)
    return float(prefill.attention_equals_linear_context(parameters, layers, heads, head_dim))


def mem_over_star(row: dict[str, str]) -> float:
    util, vram, weights, _ = numbers(row["inputs"])
    return float(lm.b_mem_over_b_star(util * vram, weights))


def b_star_ratio(row: dict[str, str]) -> float:
    w1, kv1, w2, kv2 = numbers(row["inputs"])
    return float(lm.b_star(w1, kv1) / lm.b_star(w2, kv2))


def of(row: dict[str, str], f: Callable[..., object]) -> float:
    return float(f(*numbers(row["inputs"])))  # type: ignore[arg-type]


QUANTITIES: dict[str, Callable[[dict[str, str], dict[str, float]], float]] = {
    "kv_bytes_per_token": lambda r, i: per_token(r),
    "kv_bytes_per_sequence": lambda r, i: i["kv"],
    "kv_bytes_total": lambda r, i: i["B"] * i["kv"],
    "kv_bytes_total/weight_bytes": lambda r, i: i["B"] * i["kv"] / i["W"],
    "memory_total": lambda r, i: numbers(r["inputs"])[0] + by_id("little-kv"),
    "weight_bytes": lambda r, i: float(tensor_format("bf16").bytes_of(1, int(i["P"]))),
    "kv_bytes_per_token ratio": lambda r, i: kv_bytes_per_token(
        attention_only(*MHA_13B), kv_format("bf16")) / kv_bytes_per_token(attention_only(*GQA_8B), kv_format("bf16")),
    "b_mem": lambda r, i: float(lm.b_mem(pool(i), i["kv"])),
    "b_star": lambda r, i: float(lm.b_star(i["W"], i["kv"])),
    "b_gemm": lambda r, i: float(lm.b_gemm(i["ridge"], 2.0, 1.0)),
    "compute_crossover_batch": lambda r, i: float(lm.b_compute(i["ridge"], i["W"], i["P"], i["kv"])),
    "step_time": lambda r, i: step(r),
    "1/step_time": lambda r, i: 1.0 / step(r),
    "step_time ratio": lambda r, i: by_id("tpot-8b-mha-128k") / by_id("tpot-8b-short"),
    "ridge_point": lambda r, i: float(roofline.ridge_point(i["peak"], i["bandwidth"])),
    "arithmetic_intensity": lambda r, i: float(roofline.arithmetic_intensity(i["B"], i["P"], i["W"], i["kv"])),
    "arithmetic_intensity_limit": lambda r, i: float(roofline.arithmetic_intensity_limit(i["P"], i["kv"])),
    "prefill_flops": lambda r, i: float(prefill.prefill_linear_flops(i["P"], i["L"])),
    "prefill_time": lambda r, i: (lambda flops, percent, peak: float(
        prefill.prefill_time_s(flops, peak, percent / 100)))(*numbers(r["inputs"])),
    "concurrency": lambda r, i: float(lm.in_flight_at_step_time(i["rate"], i["output"], i["tpot"])),
    "time_per_output_token_amortized": lambda r, i: float(
        lm.amortized_time_s(i["B"], i["W"], i["kv"], i["bandwidth"])),
    "time_per_output_token_amortized_limit": lambda r, i: float(lm.amortized_limit_s(i["kv"], i["bandwidth"])),
    "amortized(B*)/floor": lambda r, i: amortized_at_b_star(r),
    "in_flight": lambda r, i: float(lm.in_flight(i["rate"], i["n_out"], i["W"], i["kv"], i["bandwidth"])),
    "max_request_rate": lambda r, i: ceiling(r),
    "slot_utilization": lambda r, i: lm.static_slot_utilization(numbers(r["inputs"])),
    "context": lambda r, i: equal_context(r),
    "throughput(2B*)/throughput(B*)": lambda r, i: float(lm.doubling_gain(1.0)),
    "B/B*": lambda r, i: float(lm.gain_knee(numbers(r["inputs"].split("=")[1])[0] - 1.0)),
    "B_mem/B*": lambda r, i: mem_over_star(r),
    "B* GQA / B* MHA": lambda r, i: (lambda gqa, mha: float(
        lm.b_star(1.0, kv_of(attention_only(32, int(gqa)), 1)) / lm.b_star(1.0, kv_of(attention_only(32, int(mha)), 1))
    ))(*numbers(r["inputs"])),
    "B* ratio": lambda r, i: b_star_ratio(r),
    "mbu": lambda r, i: of(r, roofline.model_bandwidth_utilization),
    "expected_distinct_experts": lambda r, i: expected_distinct_experts(
        int(i["n_experts"]), int(i["top_k"]), i["tokens"]),
}


def compute(row: dict[str, str]) -> float:
    return QUANTITIES[row["quantity"]](row, parse(row["inputs"], row["id"]))


def test_the_table_is_complete() -> None:
    assert len(ROWS) == 79
    assert {r["quantity"] for r in ROWS} <= set(QUANTITIES)


@pytest.mark.parametrize("row", ROWS, ids=[r["id"] for r in ROWS])
def test_a_worked_example_is_exact(row: dict[str, str]) -> None:
    assert math.isclose(compute(row), float(row["exact"]), rel_tol=1e-9)


def test_landmarks_and_weights_agree_on_distinct_experts() -> None:
    for tokens in (1, 7, 32, 500):
        assert math.isclose(
            expected_distinct_experts(256, 8, tokens), float(lm.expected_distinct_experts(256, 8, tokens)))
