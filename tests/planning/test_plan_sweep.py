"""Plans over random models, GPUs and loads of the catalog: no crash, laws kept, a reason where there is no answer."""

import json
import random

import pytest

from bstar.catalog.devices import device_ids
from bstar.catalog.models import entry_ids
from bstar.planning.plan import plan

LOADS = [
    {"rate_per_s": 2, "slo": "ttft=2s,tpot=60ms"}, {"concurrency": 32}, {"slo": "batch"}, {"slo": "streaming"},
    {"concurrency": 8, "slo": "agent"}, {"rate_per_s": 20, "burstiness": 0.3, "slo": "e2e=30s"},
]  # fmt: skip
LENGTHS = [(500, 100), ("lognormal:mean=800,cv=1", 200), (30_000, 50), (200, 1), (64, "uniform:500-1500")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_keep_the_laws(seed):
    rng = random.Random(seed)
    models, devices = list(entry_ids()), list(device_ids())
    for _ in range(12):
        model, gpus = rng.choice(models), f"{rng.choice(devices)},h200-sxm-141gb"
        (inputs, outputs), load = rng.choice(LENGTHS), rng.choice(LOADS)
        label = f"{model} on {gpus}: {inputs}/{outputs} {load}"
        result = plan(model, gpus, input_tokens=inputs, output_tokens=outputs, most_candidates=3, **load)
        json.dumps(result.to_dict(), allow_nan=False)
        assert result.feasible or result.reasons(), label
        for c in result.candidates:
            p = c.predicted
            assert c.memory["fits"], label
            assert c.slo_attainment_fraction >= result.slo.attainment_fraction, label
            assert c.requests_per_s / c.replicas * p.e2e_s.mean == pytest.approx(p.in_flight, rel=0.01), label
            if "concurrency" in load:
                assert p.in_flight * c.replicas == pytest.approx(load["concurrency"], rel=0.01), label
            if "rate_per_s" in load:
                assert c.requests_per_s == pytest.approx(load["rate_per_s"]), label
                assert c.capacity_requests_per_s >= load["rate_per_s"] * (1 - 1e-9), label
            assert p.decoding <= c.deployment.engine.max_num_seqs * c.layout.attention_dp + 1e-6, label
