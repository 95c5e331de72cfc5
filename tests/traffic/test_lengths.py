"""Length distributions: what is written is what is drawn; bad text is one clear error."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import InputError
from bstar.specs.slo import SLO_PRESETS, parse_slo
from bstar.specs.workload import Workload
from bstar.traffic.lengths import CHUNK, fixed, longest, normal_quantile, parse_lengths, quantile, sample

TEXTS = ["512", "8k", "uniform:100-900", "normal:mean=512,cv=0.3", "normal:mean=500,std=200",
         "lognormal:mean=512,cv=1.2",
         "lognormal:mean=512,cv=1.2,max=4096", "exponential:mean=200,min=16", "values:128,512,2048",
         "uniform:mean=512,ratio=0.2", "uniform:max=512,ratio=0.8", "zipf:alpha=1.2,max=8192",
         "zipf:alpha=0.5,min=100,max=900"]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_draws_have_the_moments_of_the_distribution(text):
    dist = parse_lengths(text)
    draws = sample(dist, 200_000, np.random.default_rng(0))
    assert draws.min() >= 1
    assert draws.mean() == pytest.approx(dist.mean, rel=0.02)
    assert draws.std() == pytest.approx(dist.cv * dist.mean, rel=0.04, abs=1e-9)
    assert draws.max() <= longest(dist, probability=1.0)
    assert (np.diff(quantile(dist, np.linspace(0, 1, 101))) >= 0).all()


def test_exact_forms():
    assert parse_lengths("512") == fixed(512)
    assert parse_lengths("8k").mean == 8000
    assert parse_lengths("8Ki").mean == 8192
    assert parse_lengths("uniform:100-900") == parse_lengths("uniform:min=100,max=900")
    dist = parse_lengths("lognormal:mean=512,cv=1.2")
    assert (dist.mean, dist.cv) == (512, 1.2)
    assert dist.second_moment == pytest.approx(512**2 * 2.44)
    assert parse_lengths("normal:mean=512,cv=0") == fixed(512)


def test_range_ratios_are_those_of_the_bench_clients():
    # vLLM 0.32: floor(mean·(1 - r)) … ceil(mean·(1 + r)); SGLang and older vLLM: int(max·r) … max.
    texts = ["uniform:mean=512,ratio=0.2", "uniform:max=512,ratio=0.8", "uniform:mean=1,ratio=0.5"]
    texts.append("uniform:max=8k,ratio=1")
    ends = [(d.low, d.high) for d in map(parse_lengths, texts)]
    assert ends == [(409, 615), (409, 512), (1, 2), (8000, 8000)]


def test_zipf_is_the_law_of_its_ranks():
    dist = parse_lengths("zipf:alpha=1.3,min=10,max=59")
    weights = np.arange(1, 51) ** -1.3
    expected = weights / weights.sum()
    assert dist.mean == pytest.approx(float(np.arange(10, 60) @ expected))
    draws = sample(dist, 200_000, np.random.default_rng(1))
    share = np.bincount(draws, minlength=60)[10:] / 200_000
    assert np.abs(share - expected).max() < 4.5 * np.sqrt(expected[0] / 200_000)
    assert parse_lengths("zipf:alpha=0,max=9").cv == pytest.approx(parse_lengths("uniform:1-9").cv)


def test_draws_come_in_pieces_that_join():
    for text in TEXTS:
        dist = parse_lengths(text)
        long = sample(dist, CHUNK + 7, np.random.default_rng(2))
        assert (long[:1000] == sample(dist, CHUNK, np.random.default_rng(2))[:1000]).all()
        assert long.size == CHUNK + 7


@pytest.mark.parametrize("text", ["", "abc", "-5", "0", "nan", "1e400", "uniform:9-1", "uniform:100", "uniform:0-5",
                                  "normal:cv=1", "normal:mean=5", "normal:mean=5,cv=1,std=2", "lognormal:mean=0,cv=1",
                                  "lognormal:mean=nan,cv=1", "lognormal:mean=5,cv=-1", "lognormal:mean=5,cv=1,foo=2",
                                  "lognormal:mean=5,mean=6,cv=1", "lognormal:mean=500,cv=1,min=9,max=3", "gauss:1",
                                  "trace", "values:", "values:1,x", "exponential:mean=5,cv=2", "1e12",
                                  "uniform:mean=512", "uniform:ratio=0.2", "uniform:mean=512,max=600,ratio=0.2",
                                  "uniform:mean=512,ratio=1", "uniform:max=512,ratio=2", "uniform:mean=5.5,ratio=0.1",
                                  "zipf:alpha=1", "zipf:max=9", "zipf:alpha=-1,max=9", "zipf:alpha=1,min=9,max=3",
                                  "zipf:alpha=1,max=1e8", "zipf:alpha=nan,max=9", "zipf:alpha=1,max=9.5"])  # fmt: skip
def test_bad_lengths_are_one_line_that_names_the_field(text):
    with pytest.raises(InputError) as error:
        parse_lengths(text, field="input")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(("input", "length"))


@given(st.text(max_size=40))
def test_any_text_is_a_distribution_or_an_input_error(text):
    for parse in (parse_lengths, parse_slo):
        with contextlib.suppress(InputError):
            parse(text)


def test_normal_quantile_is_the_inverse():
    assert normal_quantile(np.array([0.5, 0.975])) == pytest.approx([0.0, 1.959964], abs=1e-6)


def test_slo_text():
    slo = parse_slo("ttft=500ms, tpot=50ms,e2e=10s", attainment_fraction=0.95)
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s, slo.attainment_fraction) == (0.5, 0.05, 10.0, 0.95)
    assert parse_slo("chat") == SLO_PRESETS["chat"]
    changed = parse_slo("chat,tpot=30ms")
    assert (changed.ttft_s, changed.tpot_s) == (0.5, 0.03)
    assert parse_slo("batch").is_empty


@pytest.mark.parametrize("text", ["", "ttft=5", "fast", "ttft=1s,ttft=2s", "tpot=0ms", "tpot=-5ms", "itl=5ms", "ttft=",
                                  "tpot=50ms,chat", "tpot=infs"])  # fmt: skip
def test_bad_slo_is_one_line(text):
    with pytest.raises(InputError) as error:
        parse_slo(text)
    assert "\n" not in str(error.value)


def test_workload_contexts_weigh_long_answers_more():
    load = Workload(input_tokens=fixed(100), output_tokens=parse_lengths("values:10,30"), rate_per_s=1.0)
    assert load.mean_decode_context_tokens == pytest.approx((10 * 105 + 30 * 115) / 40)
    joint = Workload(input_tokens=parse_lengths("values:100,200"), output_tokens=parse_lengths("values:10,30"),
                     joint=((100, 10), (200, 30)))  # fmt: skip
    assert joint.mean_decode_context_tokens == pytest.approx((10 * 105 + 30 * 215) / 40)
    assert joint.mean_full_context_tokens == 170
