"""Measured points: what is read of a file, and the deployments that rows name."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bstar.calibration.bundled import LATENCY, SERVING, bundled_points, bundled_text
from bstar.calibration.points import Point, deployment_of, read_points, read_rows
from bstar.errors import BstarError, ConfigError, NotInCatalogError, SpecError

HEAD = ("id,engine,engine_version,model,gpu,weight_dtype,isl_tokens,osl_tokens,concurrency,num_gpus,attention_tp,"
        "ttft_ms,tpot_ms")  # fmt: skip
ROW = "a,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,bf16,1024,128,8.0,2.0,2.0,50,12.5"


def rows(*lines: str, head: str = HEAD) -> list[Point]:
    return read_rows("\n".join((head, *lines)) + "\n")


def one(**changes: str) -> Point:
    """A row with some cells changed."""
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True))
    cells |= changes
    return rows(",".join(cells.values()), head=",".join(cells))[0]


def test_bundled_points_are_all_read() -> None:
    serving, latency = bundled_points(SERVING), bundled_points(LATENCY)
    assert (len(serving), len(latency)) == (2112, 3011)
    assert not [p for p in (*serving, *latency) if p.fault]
    assert sum(not p.is_disaggregated for p in serving) == 1590
    # 156 + 37 + 6 + 3 rows have a label_note, 43 + 26 an uncertain layout
    assert sum(bool(p.label_note) for p in serving) == 202
    assert sum("uncertain" in p.layout_note for p in serving) == 69
    assert sum(p.counts for p in serving) == 2112 - 202 - 69


def test_units_are_seconds_and_counts() -> None:
    p = one()
    assert (p.ttft_s, p.tpot_s, p.concurrency, p.attention_tp) == (0.05, 0.0125, 8, 2)
    assert p.schema == "serving" and p.mode == "agg" and p.fault is None


def test_unknown_columns_are_ignored_and_optional_ones_may_be_missing() -> None:
    head = "engine,model,gpu,isl_tokens,osl_tokens,concurrency,colour"
    found = rows("vllm,llama-3.1-8b,h100,512,64,4,blue", head=head)
    assert found[0].id == "line 2" and found[0].fault is None and found[0].tpot_s is None


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("concurrency", "many", "concurrency: 'many' is not a number"), ("concurrency", "", "concurrency: is empty"),
        ("concurrency", "-3", "concurrency: must be a whole number"), ("concurrency", "2.5", "whole number"),
        ("isl_tokens", "inf", "isl_tokens: 'inf' is not a number"), ("osl_tokens", "0", "osl_tokens: must be a number"),
        ("tpot_ms", "-1", "tpot_ms: must not be negative"), ("attention_tp", "1e300", "attention_tp: must be a whole"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_read_is_the_rows_fault(column: str, value: str, said: str) -> None:
    bad = one(**{column: value})
    assert said in (bad.fault or "")
    assert bad.id == "a" and not bad.counts
    with pytest.raises(SpecError, match=column):
        deployment_of(bad)


@pytest.mark.parametrize("value", ["", "nan", "NaN", "None", "0"])
def test_what_was_not_measured_is_none(value: str) -> None:
    assert one(ttft_ms=value).ttft_s is None


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    for content, said in (
        (b"", "is empty"), (b"a,b\n1,2\n", "lacks the column engine"), (b"\xff\xfe\x00", "not UTF-8"),
        (HEAD.encode() + b",id\n", "column 'id' twice"), (b"\x1f\x8bxx", "gzip"),
    ):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_points(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_points(tmp_path / "none.csv")


def test_files_may_be_zipped_and_have_a_mark_of_byte_order(tmp_path: Path) -> None:
    text = "\ufeff" + HEAD + f"\r\n{ROW}\r\n\r\n"
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(text.encode()))
    found = read_points(tmp_path / "x.csv.gz")
    assert len(found) == 1 and found[0].id == "a"


def test_latency_schema_is_known_by_its_header() -> None:
    text = bundled_text(LATENCY)
    first = read_rows("\n".join(text.splitlines()[:3]))[0]
    assert first.schema == "latency" and first.mode == "static_batch" and first.tpot_s is not None


def test_engine_versions_of_any_spelling_and_blank_dtypes() -> None:
    for engine, version in (("vllm", "nightly-5b8c30d62b754b57"), ("trtllm", "gpt-oss-dev"), ("sglang", ""),
                            ("TensorRT-LLM", "1.0.0rc3"), ("trtllm", "0.8.1.post2")):  # fmt: skip
        d = deployment_of(one(engine=engine, engine_version=version, weight_dtype=""))
        assert d.model.weight_dtype == "bf16" and d.parallel.tp == 2
    d = deployment_of(one(model="deepseek-ai/DeepSeek-R1", weight_dtype="", attention_tp="8", num_gpus="8"))
    assert d.model.weight_dtype.startswith("fp8"), "a blank dtype is the checkpoint's own"


def test_model_names_may_say_the_dtype() -> None:
    a = deployment_of(one(model="nvidia/Qwen3-32B-NVFP4", gpu="b200_sxm", weight_dtype="fp4"))
    b = deployment_of(one(model="Qwen/Qwen3-32B", gpu="b200_sxm", weight_dtype="fp4"))
    assert a.model.weight_dtype == b.model.weight_dtype == "nvfp4"


def test_layouts() -> None:
    moe = {"model": "deepseek-ai/DeepSeek-R1", "weight_dtype": "fp8", "gpu": "h200_sxm"}
    d = deployment_of(one(**moe, attention_tp="", num_gpus="8", expert_parallel="8")).parallel
    assert (d.tp, d.attention_dp, d.ep) == (8, 1, 8), "without a label all GPUs are tensor parallel"
    d = deployment_of(one(**moe, attention_tp="1", num_gpus="8", attention_dp="8", expert_parallel="8")).parallel
    assert (d.tp, d.attention_dp, d.ep) == (1, 8, 8)
    d = deployment_of(one(attention_tp="1", attention_dp="4", num_gpus="4")).parallel
    assert (d.tp, d.dp) == (1, 4), "data-parallel attention of a dense model is replicas"


def test_an_impossible_layout_is_repaired_with_a_note() -> None:
    wide = {"model": "deepseek-ai/DeepSeek-R1", "weight_dtype": "fp8", "gpu": "gb200", "engine": "sglang"}
    d = deployment_of(one(**wide, attention_tp="72", num_gpus="72"))
    assert d.parallel.num_devices == 72
    assert any("layout taken as" in note for note in d.engine.notes)
    fp8 = {"model": "MiniMaxAI/MiniMax-M2.5", "weight_dtype": "fp8", "gpu": "h200_sxm"}
    assert deployment_of(one(**fp8, attention_tp="8", num_gpus="8")).parallel.ep == 8


def test_only_models_and_gpus_that_are_not_known_are_refused() -> None:
    with pytest.raises(NotInCatalogError):
        deployment_of(one(gpu="x9000"))
    with pytest.raises(BstarError):
        deployment_of(one(model="./nowhere/config.json"))
    d = deployment_of(one(engine="atom", weight_dtype="int5_magic"))
    assert {"engine 'atom' is not known: taken for vllm",
            "weight dtype 'int5_magic' is not known: the checkpoint's own is taken"} <= set(d.engine.notes)


def test_every_bundled_serving_row_names_a_deployment() -> None:
    for p in bundled_points(SERVING)[::7]:
        for side in ("prefill", "decode") if p.is_disaggregated else (None,):
            assert deployment_of(p, side=side).parallel.num_devices >= 1  # type: ignore[arg-type]


def test_a_load_that_is_not_known_is_told_with_its_line() -> None:
    head = "engine,model,gpu,isl,osl,load_kind,load_value,tpot_ms"
    good = "vllm,llama-3.1-8b,h100,512,64,closed,4,9"
    found = rows(*[good] * 4, good.replace("closed", "weird"), head=head)
    assert [p.id for p in found] == [f"line {n}" for n in range(2, 7)]
    assert found[-1].fault is not None and found[-1].fault.startswith("load_kind 'weird' is not known")
