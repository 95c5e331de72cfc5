"""Plans: what an expert would say, the laws that any planner must keep, and the contract."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bstar.catalog.devices import get_device
from bstar.errors import InputError, SpecError
from bstar.planning import plan as planner
from bstar.specs.slo import Slo
from bstar.specs.workload import Workload
from bstar.traffic.lengths import fixed

DATA = Path(__file__).parent.parent / "data" / "traces"
CHAT = {"input_tokens": "lognormal:mean=1000,cv=1", "output_tokens": "lognormal:mean=250,cv=1", "slo": "chat"}
BOUNDS = {"weight_bandwidth", "kv_bandwidth", "compute", "kv_capacity", "communication", "overhead", "token_budget",
          "max_num_seqs", "queueing"}  # fmt: skip


def plan(*args, most_candidates=3, **fields):
    """Fewer candidates than a user gets: the best ones are the same, and the tests take a third of the time."""
    return planner.plan(*args, most_candidates=most_candidates, **fields)


def usd(result):
    return result.best.cost.usd_per_hour


# -- what an expert would say ---------------------------------------------------------------------------------


def test_a_small_model_takes_one_gpu():
    best = plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=8, **CHAT).best
    assert (best.layout.num_gpus, best.replicas) == (1, 1)
    assert best.launch_command.startswith("vllm serve meta-llama/")


def test_70b_in_bf16_needs_more_than_one_80_gb_gpu():
    result = plan("llama-3.1-70b", "h100-sxm-80gb", input_tokens=2000, output_tokens=300, rate_per_s=4,
                  slo="tpot=40ms,ttft=2s")  # fmt: skip
    assert result.best.layout.tp in (4, 8)
    one = next(r for r in result.rejected if r.layout.num_gpus == 1)
    assert one.kind == "memory"
    assert "weights alone take 131" in one.reason
    assert all(c.layout.num_gpus >= 2 for c in result.candidates)


def test_deepseek_r1_takes_a_node_of_h200():
    result = plan("deepseek-r1", "h200-sxm-141gb", input_tokens=2000, output_tokens=300, rate_per_s=4,
                  slo="tpot=50ms,ttft=2s")  # fmt: skip
    assert result.best.layout.num_gpus == 8
    assert result.best.deployment.model.weight_dtype.startswith("fp8")


def test_a_cheaper_gpu_is_chosen_where_the_slo_allows_it():
    prices = {"h100-sxm-80gb": 3.0, "l40s": 0.9}
    relaxed = plan("llama-3.1-8b", "h100-sxm-80gb,l40s", input_tokens=500, output_tokens=200, rate_per_s=1,
                   slo="tpot=80ms,ttft=2s", prices=prices).best  # fmt: skip
    assert relaxed.deployment.device.id == "l40s"
    tight = plan("llama-3.1-8b", "h100-sxm-80gb,l40s", input_tokens=500, output_tokens=200, rate_per_s=1,
                 slo="tpot=10ms,ttft=2s", prices=prices).best  # fmt: skip
    assert tight.deployment.device.id == "h100-sxm-80gb"


def test_more_load_takes_more_replicas():
    counts = [plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=r, max_num_seqs=256, **CHAT).best.num_gpus
              for r in (5, 50, 200)]  # fmt: skip
    assert counts == sorted(counts)
    assert counts[-1] >= 8


def test_a_tighter_tpot_takes_wider_tensor_parallelism():
    def tp(limit):
        return plan("llama-3.1-70b", "h100-sxm-80gb", input_tokens=1000, output_tokens=200, rate_per_s=0.5,
                    slo=f"tpot={limit}").best.layout.tp  # fmt: skip

    assert tp("60ms") < tp("12ms")


def test_an_impossible_slo_is_explained():
    result = plan("llama-3.1-70b", "h100-sxm-80gb", input_tokens=2000, output_tokens=300, rate_per_s=1, slo="tpot=2ms")
    assert not result.feasible
    assert result.to_dict()["feasible"] is False
    assert "TPOT SLO 2.00 ms is below the floor of 5." in result.reasons()[0]
    ttft = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=8000, output_tokens=10, rate_per_s=1, slo="ttft=20ms")
    assert any("TTFT SLO 20.0 ms is below" in reason and "8,000 tokens" in reason for reason in ttft.reasons())
    e2e = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=100, output_tokens=1000, rate_per_s=1, slo="e2e=500ms")
    assert any("E2E SLO" in reason for reason in e2e.reasons())


def test_a_model_that_fits_nowhere_is_explained():
    result = plan("deepseek-r1", "l4", input_tokens=100, output_tokens=100, max_gpus=8)
    assert not result.feasible
    assert all(r.kind in ("memory", "layout", "dtype") for r in result.rejected)
    assert "weights" in " ".join(result.reasons())


def test_a_dtype_without_a_peak_or_a_layout_that_does_not_divide_is_a_reason():
    result = plan("qwen3-32b", "v100-sxm2-32gb", input_tokens=100, output_tokens=100)
    assert result.feasible or any("bf16" in r.reason or "peak" in r.reason for r in result.rejected)
    odd = plan("qwen2.5-0.5b", "h100-sxm-80gb", input_tokens=100, output_tokens=100, max_gpus=8)  # 14 heads
    assert any("14" in r.reason and r.layout.tp in (4, 8) for r in odd.rejected)


def test_quantization_on_request():
    load = {"input_tokens": 1000, "output_tokens": 200, "rate_per_s": 2}
    own = plan("llama-3.1-70b", "h100-sxm-80gb", slo="tpot=50ms,ttft=2s", **load)
    both = plan("llama-3.1-70b", "h100-sxm-80gb", slo="tpot=50ms,ttft=2s", weight_dtypes="auto,fp8",
                kv_cache_dtypes="auto,fp8", most_candidates=20, **load)  # fmt: skip
    assert usd(both) <= usd(own)
    assert {c.deployment.model.weight_dtype for c in both.candidates} >= {"fp8", "bf16"}
    assert {c.deployment.kv_format.name for c in both.candidates} >= {"fp8", "bf16"}
    only = plan("llama-3.1-70b", "h100-sxm-80gb", weight_dtypes="fp8", **load)
    assert {c.deployment.model.weight_dtype for c in only.candidates} == {"fp8"}


def test_offline_work_takes_the_largest_batches():
    chat = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=1000, output_tokens=250, slo="chat,tpot=15ms").best
    batch = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=1000, output_tokens=250, slo="batch").best
    assert batch.output_tokens_per_s / batch.num_gpus > chat.output_tokens_per_s / chat.num_gpus
    assert batch.deployment.engine.max_num_seqs > chat.deployment.engine.max_num_seqs
    assert batch.deployment.engine.max_num_seqs <= 0.9 * batch.landmarks["b_mem"] + 1


# -- laws -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", pytest.param("l40s", marks=pytest.mark.slow)])
def test_cost_never_falls_with_the_rate(gpu):
    costs = [usd(plan("llama-3.1-8b", gpu, rate_per_s=rate, **{**CHAT, "slo": "ttft=3s,tpot=60ms"}))
             for rate in (0.5, 8, 20, 60)]  # fmt: skip
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    "gpus", ["h100-sxm-80gb", pytest.param("l40s,h100-sxm-80gb,a100-sxm-80gb", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["tpot", "ttft", "e2e"])
def test_a_tighter_slo_is_never_cheaper(name, gpus):
    limits = {"tpot": ("100ms", "25ms", "9ms"), "ttft": ("5s", "1s", "250ms"), "e2e": ("60s", "15s", "6s")}[name]
    results = [plan("llama-3.1-8b", gpus, rate_per_s=20, **{**CHAT, "slo": f"{name}={limit}"}) for limit in limits]
    costs = [usd(r) if r.feasible else math.inf for r in results]
    assert costs == sorted(costs)


def test_more_attainment_is_never_cheaper():
    costs = [usd(plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=60, attainment_fraction=a, **CHAT))
             for a in (0.5, 0.9, 0.99)]  # fmt: skip
    assert costs == sorted(costs)


@pytest.mark.parametrize(("model", "rate"), [
    ("llama-3.1-8b", 40), pytest.param("qwen3-30b-a3b", 40, marks=pytest.mark.slow),
    pytest.param("gemma-3-27b", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_more_bandwidth_or_more_compute_is_never_worse(model, rate):
    base = get_device("h100-sxm-80gb")
    wide = replace(base, id="wide", bandwidth_bytes_per_s=1.5 * base.bandwidth_bytes_per_s)
    strong = replace(base, id="strong", peak_flops_per_s={k: 1.5 * v for k, v in base.peak_flops_per_s.items()})
    costs = [usd(plan(model, device, rate_per_s=rate, prices={device.id: 2.0}, **CHAT))
             for device in (base, wide, strong)]  # fmt: skip
    assert costs[1] <= costs[0]
    assert costs[2] <= costs[0]


@pytest.mark.parametrize(("model", "gpus", "slo"), [
    ("llama-3.1-8b", "h100-sxm-80gb,l40s", "chat"), ("llama-3.1-70b", "h200-sxm-141gb", "tpot=40ms,ttft=2s"),
    ("qwen3-30b-a3b", "h100-sxm-80gb", "chat"), ("deepseek-r1", "b200-sxm-180gb", "streaming"),
    ("gemma-3-27b", "h100-sxm-80gb", "agent,e2e=20s"), ("qwen3.5-35b-a3b", "h100-sxm-80gb", "chat"),
])  # fmt: skip
def test_every_candidate_keeps_the_laws(model, gpus, slo):
    rate = 6.0
    result = plan(model, gpus, rate_per_s=rate, most_candidates=8, **{**CHAT, "slo": slo})
    assert result.feasible
    amounts = [c.cost.usd_per_hour for c in result.candidates]
    assert amounts == sorted(amounts)
    for c in result.candidates:
        assert c.memory["fits"], c.memory["reason"]
        assert c.slo_attainment_fraction >= 0.99
        assert c.capacity_requests_per_s >= rate * (1 - 1e-9)
        assert c.requests_per_s == pytest.approx(rate)
        assert c.goodput_requests_per_s == pytest.approx(rate * c.slo_attainment_fraction)
        p = c.predicted
        # Little's law, of everybody in the system and of those that decode.
        assert rate / c.replicas * p.e2e_s.mean == pytest.approx(p.in_flight)
        assert rate / c.replicas * (p.e2e_s.mean - p.ttft_s.mean) == pytest.approx(p.decoding, rel=0.15)
        assert p.decoding <= c.landmarks["b_mem"]
        for metric in (p.ttft_s, p.tpot_s, p.e2e_s):
            assert 0 < metric.p50 <= metric.p95 <= metric.p99
        assert c.bound_by in BOUNDS
        assert c.deployment.engine.max_num_seqs <= c.deployment.engine.max_num_batched_tokens
    assert any(c.pareto for c in result.candidates)


def test_peak_and_headroom_are_paid_for():
    base, peak, spare = (plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=15, **CHAT, **extra)
                         for extra in ({}, {"peak_factor": 3.0}, {"headroom_fraction": 0.6}))  # fmt: skip
    assert peak.best.num_gpus > base.best.num_gpus
    assert spare.best.num_gpus > base.best.num_gpus
    assert peak.best.requests_per_s == pytest.approx(15)


def test_bursts_are_paid_for():
    slo = {**CHAT, "slo": "ttft=300ms,tpot=40ms"}
    steady, bursty = (plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=18, burstiness=b, **slo) for b in (1.0, 0.1))
    assert bursty.best.num_gpus >= steady.best.num_gpus
    assert any("bursty" in note for note in bursty.best.notes)


def test_a_closed_loop_is_sized_by_clients():
    result = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=1000, output_tokens=250, concurrency=300,
                  slo="tpot=20ms")  # fmt: skip
    best = result.best
    assert best.clients_per_replica * best.replicas == pytest.approx(300)
    assert best.predicted.tpot_s.p99 <= 0.0205
    # Little: clients = rate · E2E.
    assert best.requests_per_s * best.predicted.e2e_s.mean == pytest.approx(300, rel=0.01)
    assert best.predicted.in_flight * best.replicas == pytest.approx(300, rel=0.01)
    long = plan("llama-3.3-70b", "h100-sxm-80gb", weight_dtypes="fp8", kv_cache_dtypes="fp8", input_tokens=128_000,
                output_tokens=72, concurrency=5, slo="e2e=10min").best  # fmt: skip
    assert long.requests_per_s * long.predicted.e2e_s.mean == pytest.approx(5, rel=0.01)


def test_a_shared_prefix_saves():
    kwargs = {"input_tokens": 4000, "output_tokens": 100, "slo": "ttft=1s,tpot=40ms"}
    cold = plan("llama-3.1-8b", "h100-sxm-80gb", **kwargs).best
    warm = plan("llama-3.1-8b", "h100-sxm-80gb", prefix_tokens=3000, prefix_hit_fraction=0.9, **kwargs).best
    assert warm.capacity_requests_per_s / warm.num_gpus > 1.5 * cold.capacity_requests_per_s / cold.num_gpus
    off = plan("llama-3.1-8b", "h100-sxm-80gb", prefix_tokens=3000, enable_prefix_caching=False, **kwargs).best
    assert off.capacity_requests_per_s == pytest.approx(cold.capacity_requests_per_s)


def test_places_beyond_the_memory_are_not_counted_on():
    """A user's max_num_seqs of 512 at 8K context on 80 GB: the flag is kept, what is predicted fits the cache."""
    load = {"input_tokens": 8000, "output_tokens": 500, "slo": "batch"}
    best = plan("llama-3.1-70b", "h100-sxm-80gb", max_num_seqs=512, **load).best
    assert best.deployment.engine.max_num_seqs == 512
    assert best.predicted.decoding <= best.landmarks["b_mem"]
    assert best.bound_by == "kv_capacity"
    assert best.predicted.preemption_risk_fraction > 0.99
    assert plan("llama-3.1-70b", "h100-sxm-80gb", **load).best.predicted.preemption_risk_fraction < 0.05


def test_max_gpus_is_kept():
    result = plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=500, max_gpus=4, **CHAT)
    assert not result.feasible
    assert any("more than the 4 allowed" in reason for reason in result.reasons())
    assert plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=5, max_gpus=4, **CHAT).best.num_gpus <= 4


def test_an_unknown_price_is_a_note_not_a_rejection():
    device = replace(get_device("h100-sxm-80gb"), price=None)
    best = plan("llama-3.1-8b", device, rate_per_s=5, **CHAT).best
    assert best.cost.usd_per_hour is None
    assert any("--price" in note for note in best.notes)
    priced = plan("llama-3.1-8b", device, rate_per_s=5, prices={"h100-sxm-80gb": 2.0}, **CHAT).best
    assert priced.cost.usd_per_hour == pytest.approx(2.0 * priced.num_gpus)
    assert priced.cost.usd_per_million_output_tokens == pytest.approx(
        priced.cost.usd_per_hour / (priced.output_tokens_per_s * 3600) * 1e6
    )


# -- contract and input ---------------------------------------------------------------------------------------


def test_json_contract():
    out = json.loads(json.dumps(plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=5, **CHAT).to_dict(), allow_nan=False))
    first = out["candidates"][0]
    assert set(first["deployment"]) >= {
        "gpu", "num_gpus", "replicas", "tp", "pp", "dp", "ep", "weight_dtype", "kv_dtype", "max_num_seqs",
        "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "mode",
    }  # fmt: skip
    assert first["deployment"]["mode"] == "aggregated"
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(first["predicted"][metric]) - {"range_80"} == {"mean", "p50", "p95", "p99"}
    assert {"memory", "landmarks", "output_tokens_per_s", "requests_per_s", "goodput_requests_per_s",
            "slo_attainment_fraction", "cost", "bound_by", "launch_command"} <= set(first)  # fmt: skip
    d = first["deployment"]
    assert d["tp"] * d["pp"] * d["dp"] * d["replicas"] == d["num_gpus"]
    assert all(r["reason"] for r in out["rejected"])


def test_launch_command_says_what_was_planned():
    best = plan("llama-3.1-70b", "h200-sxm-141gb", input_tokens=2000, output_tokens=300, rate_per_s=2,
                slo="tpot=30ms,ttft=2s", kv_cache_dtypes="fp8").best  # fmt: skip
    command, engine = best.launch_command, best.deployment.engine
    assert f"--max-num-seqs {engine.max_num_seqs}" in command
    assert f"--max-model-len {engine.max_model_len}" in command
    assert "--kv-cache-dtype fp8" in command
    assert best.layout.tp == 1 or f"--tensor-parallel-size {best.layout.tp}" in command


def test_max_model_len_is_what_the_lengths_need():
    assert plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=1000, output_tokens=200).max_model_len == 1280
    long = plan("llama-3.1-8b", "h100-sxm-80gb,l40s", input_tokens=140_000, output_tokens=200)
    assert not long.feasible
    assert "takes 131,072" in long.reasons()[0]
    with pytest.raises(SpecError, match="too short"):
        plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens=1000, output_tokens=200, max_model_len=1024)
    tail = plan("llama-3.1-8b", "h100-sxm-80gb", input_tokens="lognormal:mean=12000,cv=2", output_tokens=200)
    assert tail.max_model_len == 131_072


def test_a_trace_is_a_load():
    result = plan("llama-3.1-8b", "h100-sxm-80gb", trace=DATA / "azure_conv_2023.csv", slo="ttft=2s,tpot=60ms")
    assert result.feasible
    assert result.workload.joint
    rescaled = plan("llama-3.1-8b", "h100-sxm-80gb", trace=DATA / "azure_conv_2023.csv", rate_per_s=3.0,
                    slo="tpot=60ms")  # fmt: skip
    assert rescaled.best.requests_per_s == pytest.approx(3.0)


def test_bursts_take_the_fewest_replicas_that_meet_the_slo():
    """No doubling: one replica less would miss the SLO, whatever its setting."""
    counts = []
    for rate in (20, 30, 45):
        load = {"input_tokens": 1000, "output_tokens": 100, "slo": "ttft=1s,tpot=40ms", "rate_per_s": rate,
                "burstiness": 0.02}  # fmt: skip
        found = plan("llama-3.1-8b", "h100-sxm-80gb", **load).best
        less = plan("llama-3.1-8b", "h100-sxm-80gb", max_gpus=found.num_gpus - 1, **load)
        assert not less.feasible
        counts.append(found.replicas)
    assert any(count & (count - 1) for count in counts), counts  # not all are powers of two


def test_a_traces_own_arrivals_are_replayed():
    """The same requests, evenly spaced and in one rush: only the rush takes more replicas than Poisson arrivals."""
    rng = np.random.default_rng(3)
    n = 3000
    calm = np.cumsum(rng.exponential(0.1, n))
    rush = np.sort(np.concatenate([rng.uniform(0, n / 10, n - 900), rng.uniform(100, 110, 900)]))
    gpus = {}
    for name, arrivals in (("calm", calm), ("rush", rush)):
        gaps = np.diff(arrivals)
        load = Workload(
            input_tokens=fixed(3000), output_tokens=fixed(20), rate_per_s=10.0, joint=((3000, 20),) * n,
            burstiness=float(gaps.mean() ** 2 / gaps.var()), arrivals_s=tuple(arrivals.tolist()),
        )
        best = plan("llama-3.1-8b", "h100-sxm-80gb", load, "ttft=1s,tpot=60ms").best
        assert any("replayed" in note for note in best.notes)
        gpus[name] = best.num_gpus
    poisson = plan("llama-3.1-8b", "h100-sxm-80gb", replace(load, arrivals_s=(), burstiness=1.0), "ttft=1s,tpot=60ms")
    assert gpus["calm"] == poisson.best.num_gpus < gpus["rush"]


def test_what_costs_far_more_than_the_best_or_only_works_when_idle_is_no_candidate():
    result = plan("llama-3.1-70b", "h100-sxm-80gb", input_tokens="lognormal:mean=1200,cv=1", output_tokens=200,
                  rate_per_s=5, slo="chat", most_candidates=20)  # fmt: skip
    least = usd(result)
    assert all(c.cost.usd_per_hour <= 10 * least for c in result.candidates)
    for one in result.rejected:
        if one.kind == "cost" or "idle" in one.reason:
            break
    else:
        assert all(c.num_gpus < 100 for c in result.candidates)
    assert all(line.split()[0].isdigit() for line in result.rejected_summary())
    assert sum(int(line.split()[0]) for line in result.rejected_summary()) == len(result.rejected)


def test_the_peak_and_an_unused_price_are_told():
    result = plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=4, peak_factor=2, prices={"h10": 1.0}, **CHAT)
    notes = " ".join(result.notes)
    assert "peak of 8 requests/s" in notes
    assert "price of h10 is not used" in notes
    assert "did you mean h100-sxm-80gb?" in notes


def test_a_gpu_without_bf16_serves_in_fp16_and_says_so():
    load = {"input_tokens": 500, "output_tokens": 100, "rate_per_s": 1, "slo": "tpot=100ms"}
    best = plan("llama-3.1-8b", "v100-sxm2-32gb", **load).best
    assert best.deployment.model.weight_dtype == "fp16"
    assert any("fp16" in note for note in best.notes)


def test_python_specs_are_taken_as_they_are():
    load = Workload(input_tokens=fixed(500), output_tokens=fixed(100), rate_per_s=2.0)
    gpus = [get_device("l40s"), "h100-sxm-80gb"]
    result = plan("llama-3.1-8b", gpus, load, Slo(tpot_s=0.05), most_candidates=20)
    assert {c.deployment.device.id for c in result.candidates} == {"l40s", "h100-sxm-80gb"}


@pytest.mark.parametrize("fields", [
    {"input_tokens": None}, {"output_tokens": None}, {"slo": "fast"}, {"gpus": ""}, {"gpus": "h999"},
    {"model": "no-such-model"}, {"rate_per_s": 0}, {"rate_per_s": -1}, {"rate_per_s": math.nan}, {"concurrency": 0},
    {"rate_per_s": 1, "concurrency": 1}, {"max_gpus": 0}, {"peak_factor": 0.5}, {"headroom_fraction": 1},
    {"prefix_tokens": 200},
    {"weight_dtypes": "fp7"}, {"kv_cache_dtypes": "fp7"}, {"prices": {"h100-sxm-80gb": -1}}, {"burstiness": 0},
    {"trace": "/no/such/file.csv"}, {"input_tokens": "uniform:9-1"}, {"attainment_fraction": 1.5},
    {"gpu_memory_utilization": 1.5}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 0},
])  # fmt: skip
def test_bad_input_is_one_line(fields):
    given = {"model": "llama-3.1-8b", "gpus": "h100-sxm-80gb", "input_tokens": 100, "output_tokens": 100, **fields}
    with pytest.raises(InputError) as error:
        plan(given.pop("model"), given.pop("gpus"), **given)
    assert "\n" not in str(error.value)


def test_plans_are_deterministic():
    one, two = (plan("llama-3.1-8b", "h100-sxm-80gb", rate_per_s=8, **CHAT).to_dict() for _ in range(2))
    assert one == two
