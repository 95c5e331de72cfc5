"""Charts: labels that do not overlap, regions by their definition, whole files or none."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.errors import ConfigError, SpecError
from bstar.interfaces.report import axes
from bstar.interfaces.report.charts import curve_chart, curve_spec
from bstar.interfaces.report.series import LANDMARK_LABELS, CurveSeries

BATCHES = tuple(2.0 ** (i / 2) for i in range(23))


def curve(**changes: Any) -> CurveSeries:
    """An 8B-like curve: affine steps on a roof of 989 TFLOP/s and 3.35 TB/s."""
    steps = tuple(5e-3 + 80e-6 * b for b in BATCHES)
    given_: dict[str, Any] = {
        "label": "8B", "model": "llama-3.1-8b", "device": "H100 SXM", "context_tokens": 2048, "batch": BATCHES,
        "step_floor_s": steps, "step_expected_s": tuple(1.4 * s for s in steps),
        "landmarks": {"b_star": 60.0, "b_gemm": 295.0, "b_compute": None, "b_mem": 211.0, "b_slo": 362.0, "b_tok": 256},
        "step_flops": tuple(16e9 * b for b in BATCHES), "step_bytes": tuple(16e9 + 268e6 * b for b in BATCHES),
        "peak_flops_per_s": 989e12, "bandwidth_bytes_per_s": 3.35e12, "compute_dtype": "bf16", "recommended": 60,
        "tpot_slo_s": 0.05, "note": "bf16 weights",
    } | changes  # fmt: skip
    return CurveSeries(**given_)


def test_amortized_time_is_step_time_over_batch() -> None:
    found = curve()
    assert found.amortized_s(found.step_floor_s)[0] == found.step_floor_s[0]
    assert found.amortized_s(found.step_floor_s)[-1] == found.step_floor_s[-1] / 2048
    assert found.ridge_point == pytest.approx(295.2, rel=1e-3)


@pytest.mark.parametrize(("changes", "part"), [
    ({"batch": (1.0,), "step_floor_s": (1.0,), "step_expected_s": (1.0,)}, "two positive values"),
    ({"batch": tuple(reversed(BATCHES))}, "ascending"),
    ({"step_floor_s": (1.0, 2.0)}, "step_floor_s needs 23"),
    ({"step_expected_s": (math.nan,) * 23}, "step_expected_s needs 23"),
    ({"step_flops": (0.0,) * 23}, "step_flops needs 23"),
    ({"landmarks": {"b_knee": 1.0}}, "b_knee"),
])  # fmt: skip
def test_a_series_that_cannot_be_drawn_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecError, match=part):
        curve(**changes)


def test_regions_end_at_an_eighth_of_b_star_at_b_star_and_at_b_mem() -> None:
    axis = axes.batch_axis([curve()], 560)
    assert axes.region_edges(curve(), axis) == [
        ("weight-bound", 1.0, 7.5), ("saturating", 7.5, 60.0), ("diminishing", 60.0, 211.0),
        ("over memory", 211.0, 2048.0)]  # fmt: skip


@pytest.mark.parametrize(("landmarks", "names"), [
    ({"b_star": 60.0, "b_mem": 40.0}, ["weight-bound", "saturating", "over memory"]),
    ({"b_star": 60.0, "b_mem": 5.0}, ["weight-bound", "over memory"]),
    ({"b_star": 60.0, "b_mem": None}, ["weight-bound", "saturating", "diminishing"]),
    ({"b_star": None, "b_mem": 40.0}, ["weight-bound", "over memory"]),
    ({"b_star": 0.5, "b_mem": 0.7}, ["over memory"]),
    ({"b_star": 1e6}, ["weight-bound"]),
    ({}, ["weight-bound"]),
])  # fmt: skip
def test_regions_without_some_landmarks(landmarks: dict[str, float | None], names: list[str]) -> None:
    found = axes.region_edges(curve(landmarks=landmarks), axes.batch_axis([curve()], 560))
    assert [name for name, _, _ in found] == names
    assert found[0][1] == 1.0 and found[-1][2] == 2048.0


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(5, 90)), min_size=1, max_size=8))
def test_texts_are_spread_without_overlap(items: list[tuple[float, float]]) -> None:
    targets, widths = sorted(t for t, _ in items), [w for _, w in items]
    centres = axes.spread_apart(targets, widths, 800.0)
    for (a, wa), (b, wb) in pairwise(zip(centres, widths, strict=True)):
        assert b - a >= (wa + wb) / 2 - 1e-6
    if sum(widths) <= 800:
        assert centres[0] - widths[0] / 2 >= -1e-6 and centres[-1] + widths[-1] / 2 <= 800 + 1e-6


def test_texts_that_do_not_collide_stay_where_they_belong() -> None:
    assert axes.spread_apart([100, 300, 500], [50, 50, 50], 800) == [100, 300, 500]
    assert axes.spread_apart([100, 100], [50, 50], 800) == [75, 125]


@given(
    st.dictionaries(st.sampled_from(sorted(LANDMARK_LABELS)), st.floats(0.01, 1e6), max_size=6),
    st.sampled_from([300.0, 560.0]),
)
def test_landmark_texts_never_overlap(landmarks: dict[str, float | None], length: float) -> None:
    axis = axes.batch_axis([curve()], length)
    placed = axes.landmark_labels(curve(landmarks=landmarks), axis, size=11)
    assert {p.name for p in placed} == set(landmarks)
    for row in {p.row for p in placed}:
        spans = sorted((axis.pixel(p.text_batch), axes.text_width(p.text, 11)) for p in placed if p.row == row)
        for (a, wa), (b, wb) in pairwise(spans):
            assert b - a >= (wa + wb) / 2 - 1e-6
    for p in placed:
        assert p.beyond == (-1 if landmarks[p.name] < 1 else 1 if landmarks[p.name] > 2048 else 0)  # type: ignore[operator]


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e12), st.sampled_from([190.0, 470.0]))
def test_ticks_lie_inside_the_axis_and_are_few(low: float, ratio: float, length: float) -> None:
    axis = axes.LogAxis(low=low, high=low * ratio, length=length)
    ticks = axes.decimal_ticks(axis)
    assert ticks and all(axis.low * 0.9 <= t <= axis.high * 1.1 for t in ticks)
    assert len(ticks) <= length / 9
    assert all(a < b for a, b in pairwise(ticks))
    assert len(axes.powers_of_two(axis)) <= length / 30


def test_an_axis_gives_back_what_it_was_asked() -> None:
    axis = axes.LogAxis(low=1, high=2048, length=560)
    assert axis.pixel(axis.value(123.0)) == pytest.approx(123.0)
    assert (axis.pixel(1), axis.pixel(2048)) == (0, pytest.approx(560))


GRID = [
    curve(label=f"{m} {d} {c}", model=m, device=d, context_tokens=c)
    for m in ("llama-2-7b", "llama-2-13b") for d in ("H100 SXM", "4 × A100 SXM") for c in (512, 8192)
]  # fmt: skip


@pytest.mark.parametrize("curves", [[curve()], GRID[:3], [curve(step_flops=(), step_bytes=())], [curve(landmarks={})]])
def test_the_specification_is_valid_vega_lite(curves: list[CurveSeries]) -> None:
    alt = pytest.importorskip("altair")
    spec = curve_spec(curves)
    alt.Chart.from_dict(spec)  # validates against Vega-Lite's schema
    texts = {row.get("text") for rows in spec["datasets"].values() for row in rows}
    if curves[0].landmark("b_star"):
        assert {"B* 60", "B_gemm 295", "B_mem 211", "B_slo 362"} <= texts
    assert "http" not in json.dumps({k: v for k, v in spec.items() if k != "$schema"})


def test_every_curve_of_a_grid_has_its_panel() -> None:
    pytest.importorskip("altair")
    batch_panels, others = curve_spec(GRID)["vconcat"][0]["vconcat"]
    assert len(batch_panels["concat"]) == 8 and batch_panels["columns"] == 2
    assert len(others["concat"]) == 2 + 2  # step time and roofline of each context: one roof


def test_what_does_not_fit_in_a_chart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no curves"):
        curve_chart([], tmp_path / "x.png")
    with pytest.raises(SpecError, match="41 curves"):
        curve_chart([curve()] * 41, tmp_path / "x.png")
    with pytest.raises(SpecError, match=r"use one of \.png"):
        curve_chart([curve()], tmp_path / "x.gif")
    with pytest.raises(SpecError, match="GPUs do not fit"):
        curve_chart([curve(model=str(i)) for i in range(11)], tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"vl_convert is not installed; pip install 'bstar\[charts\]'"):
        curve_chart([curve()], tmp_path / "x.png")


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    curve_chart([curve()], tmp_path / "x.json")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text())["vconcat"]
    with pytest.raises(ConfigError, match="choose another place"):
        curve_chart([curve()], tmp_path / "missing" / "x.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="choose another place"):
        curve_chart([curve()], tmp_path / "folder.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.json", "x.json"]


STARTS = {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF", ".html": b"<!DOCTYPE html>"}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", sorted(STARTS))
def test_every_format_is_written_without_a_network(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("vl_convert")
    target = tmp_path / f"x{suffix}"
    curve_chart([curve(model="</script><script>alert(1)</script>")], target)
    data = target.read_bytes()
    assert data.lstrip().startswith(STARTS[suffix]) and len(data) > 8000
    if suffix == ".html":
        assert b"<script>alert(1)" not in data and b"\\u003cscript>alert(1)" in data
        assert b'src="http' not in data and b"<link" not in data
    if suffix == ".svg":
        assert b"B_gemm 295" in data and b"<script" not in data
