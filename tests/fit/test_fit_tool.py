"""The fitting tool: it finds constants that were planted, and its files say what the package reads."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import bstar.latency.constant_values as constant_values
from bstar.latency.constants import constant_specs

FOLDER = Path(__file__).parents[2] / "benchmarks" / "fit"


@pytest.fixture(autouse=True)
def tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's modules import each other by their bare names, as `python benchmarks/fit` does."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(constant_values, "_file", constant_values._file)
    yield
    for name in set(sys.modules) - before:
        if "." not in name and (FOLDER / f"{name}.py").is_file():
            del sys.modules[name]


def test_integrals_of_overlapping_intervals() -> None:
    from steps import integral

    begin, end, weight = np.array([0.0, 1.0, 4.0]), np.array([2.0, 3.0, 5.0]), np.array([1.0, 2.0, 10.0])
    at = np.array([0.0, 0.5, 1.5, 3.0, 4.5, 9.0])
    expected = [sum(w * max(min(t, e) - b, 0.0) for b, e, w in zip(begin, end, weight, strict=True)) for t in at]
    np.testing.assert_allclose(integral(begin, end, weight, at), expected)


def test_bins_keep_the_weighted_sums() -> None:
    from steps import binned

    rng = np.random.default_rng(0)
    seconds, tpot, ttft = rng.uniform(0.01, 0.02, 500), rng.uniform(0, 1, 500), rng.uniform(0, 1, 500)
    sample = binned(seconds[None, :], tpot, ttft, seconds, rng.random(500) < 0.3, 48)
    assert sample.tpot.sum() == pytest.approx(tpot.sum())
    assert float(sample.tpot @ sample.values[0]) == pytest.approx(float(tpot @ seconds), rel=2e-3)
    assert float(sample.ttft @ sample.values[0]) == pytest.approx(float(ttft @ seconds), rel=2e-3)


def test_planted_terms_are_found_among_wrong_labels() -> None:
    """Times that are base + slopes · truth, 3 % noise, a tenth of them wrong by a factor of two."""
    from solve import Problem, solve, standard_errors

    rng = np.random.default_rng(1)
    n, truth = 300, np.array([2.0, 0.5, 0.0])
    slopes = rng.uniform(0, 1, (n, 2, 3))
    base = rng.uniform(1, 10, (n, 2))
    measured = (base + slopes @ truth) * np.exp(0.03 * rng.standard_normal((n, 2)))
    measured[::10] *= 2.0
    measured[5, 1] = np.nan
    problem = Problem(measured=measured, predicted=base, slopes=slopes, at=np.zeros(3), centers=np.zeros(3),
                      widths=np.full(3, 10.0), low=np.zeros(3))  # fmt: skip
    every = np.ones(n, dtype=bool)
    found = solve(problem, every)
    errors = standard_errors(problem, every, found, np.arange(n) // 10)
    assert np.all(found >= 0.0)
    assert np.all(np.abs(found - truth) < 4 * errors + 0.05)


def test_terms_move_constants_as_they_say() -> None:
    from parameters import PARAMETERS, terms_of

    for parameter in PARAMETERS:
        spec = constant_specs()[parameter.name]
        prior = min(max(0.5 * spec.high, spec.low), 0.5) if parameter.is_fraction else spec.low
        assert parameter.moved(prior, 0.0) == pytest.approx(prior)
        assert spec.low <= parameter.moved(prior, 1e9) <= spec.high
        assert parameter.moved(prior, parameter.lowest(prior)) == pytest.approx(
            spec.high if parameter.is_fraction else spec.low)
    terms = terms_of(PARAMETERS, {("vllm", "hopper", ""), ("vllm", "hopper", "0.14"), ("trtllm", "blackwell", "")})
    assert len({(t.parameter.name, t.level, t.where) for t in terms}) == len(terms)
    for term in terms:
        assert term.holds(("vllm", "hopper", "0.14")) == (term.where in (
            (), ("vllm",), ("hopper",), ("vllm", "hopper"), ("vllm", "0.14")))


def test_fitted_file_is_of_the_constants_and_in_their_ranges() -> None:
    from parameters import PARAMETERS

    raw = tomllib.loads(files("bstar.latency").joinpath("data/fitted.toml").read_text(encoding="utf-8"))
    assert {entry["name"] for entry in raw["value"]} == {p.name for p in PARAMETERS}
    for entry in raw["value"]:
        spec = constant_specs()[entry["name"]]
        assert spec.low <= entry["value"] <= spec.high, entry
        assert entry["standard_error"] >= 0.0
        assert entry["rows"] > 0


def test_report_meets_the_bars_and_every_constant_earns_its_place() -> None:
    """Figures of rows that the fit had not seen, as the command wrote them."""
    report = json.loads(files("bstar.latency").joinpath("data/fit_report.json").read_text(encoding="utf-8"))
    held = {row["rows"]: row for row in report["heldout"]}
    unseen, known = held["GPU x engine x model not seen"], held["other rows of the same GPU x engine x model seen"]
    assert unseen["TPOT median"] <= 0.09
    assert unseen["TPOT mean"] <= 0.15
    assert unseen["TTFT median"] <= 0.22
    assert known["TPOT median"] <= 0.065
    peer = {row["rows"]: row for row in report["peer"]}
    ours, theirs = peer["GPU x engine x model not seen"], peer["peer"]
    assert ours["TPOT median"] <= 0.7 * theirs["TPOT median"]
    assert ours["TTFT median"] <= 0.45 * theirs["TTFT median"]
    assert all(row["cost"] > 0 for row in report["ablation"])
