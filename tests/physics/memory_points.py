"""The measured memory points as deployments: what a row states becomes a flag, the rest the engine's default."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from bstar.catalog.engines import engine_defaults
from bstar.codec.build import build_deployment
from bstar.errors import BstarError
from bstar.physics.memory import MemoryBudget, memory_budget
from bstar.specs.deployment import Deployment
from bstar.units import GIB

POINTS = Path(__file__).parents[1] / "data" / "measured_memory_points.csv"
HELD_OUT = POINTS.with_name("heldout_memory_points.csv")

GPUS = {
    "H100-80GB": "h100-sxm-80gb", "A100-80GB": "a100-sxm-80gb", "RTX4090-24GB": "rtx-4090",
    "B200-180GB": "b200-sxm-180gb", "RTX3090-24GB": "rtx-3090",
    "RTX5090-32GB": "rtx-5090", "GB10-128GB unified": "gb10", "GH200-96GB": "gh200-96gb",
    "RTX5070Ti-16GB + RTX5090D-32GB": "rtx-5070-ti", "L40S-48GB": "l40s", "A6000-48GB": "rtx-a6000", "T4-16GB": "t4",
    "RTX4060-8GB": "rtx-4060-8gb", "A100-40GB": "a100-sxm-40gb", "MI300X-192GB": "mi300x",
    "H200-141GB": "h200-sxm-141gb",
    "RTX PRO 6000-96GB": "rtx-pro-6000", "RTX4080-16GB": "rtx-4080", "L4-24GB": "l4", "L40-48GB": "l40",
    "A10-24GB": "a10", "H100-94GB NVL": "h100-nvl-94gb", "H100-PCIe-80GB": "h100-pcie-80gb", "H20-96GB": "h20-sxm-96gb",
    "V100-32GB": "v100-sxm2-32gb", "B300-288GB": "b300-sxm-288gb",
    "RTX6000Ada-48GB": "rtx-6000-ada", "A40-48GB": "a40", "RTX4060Ti-16GB": "rtx-4060-ti-16gb",
    "RTX3060-12GB": "rtx-3060-12gb", "A10G-24GB": "a10g", "GB200-186GB": "gb200-nvl72-186gb",
    "MI325X-256GB": "mi325x", "MI355X-288GB": "mi355x", "RTX2080Ti-11GB": "rtx-2080-ti",
    "RTX PRO 5000-48GB": "rtx-pro-5000", "RTX4070-12GB": "rtx-4070-12gb",
}  # fmt: skip
MODELS = {"llama-3-70b-awq": "meta-llama/Meta-Llama-3-70B-Instruct", "cyankiwi/gemma-4-31B-it-AWQ-4bit": "gemma-4-31b"}
DTYPES = {
    "bf16": None, "fp16": None, "fp32": None, "fp8": "fp8", "mxfp4": None, "awq int4": "w4a16", "gptq int4": "w4a16",
    "w8a8": "int8", "nvfp4": "nvfp4", "int4": "w4a16", "int4 autoround": "w4a16", "marlin int4": "w4a16",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One row, its deployment (or why there is none) and the budget predicted for it."""

    row: dict[str, str]
    deployment: Deployment | None
    budget: MemoryBudget | None
    problem: str = ""

    @property
    def id(self) -> str:
        return self.row["id"]

    def number(self, column: str) -> float | None:
        text = self.row[column]
        return float(text) if text else None

    @property
    def version(self) -> tuple[int, ...]:
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.row["version"])
        return tuple(int(g or 0) for g in match.groups()) if match else ()

    @property
    def kv_gib(self) -> float | None:
        """Measured KV space where the row gives it and it is not approximate."""
        return self.number("kv_gib_per_gpu")

    def kv_error(self) -> float | None:
        if self.budget is None or self.kv_gib is None or self.kv_gib <= 0:
            return None
        return self.budget.kv_cache_bytes / GIB / self.kv_gib - 1.0

    def weight_error(self) -> float | None:
        measured = self.number("weights_gib_per_gpu")
        return None if self.budget is None or measured is None else self.budget.weight_bytes / GIB / measured - 1.0


def load_points(path: Path = POINTS) -> list[Point]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: dict[str, str]) -> Point:
    try:
        deployment = deployment_of(row)
        return Point(row=row, deployment=deployment, budget=memory_budget(deployment))
    except (BstarError, KeyError) as error:
        return Point(row=row, deployment=None, budget=None, problem=f"{type(error).__name__}: {error}")


def deployment_of(row: dict[str, str]) -> Deployment:
    """The row as flags. Raises KeyError or a BstarError where model, GPU or dtype are not stated or not known."""
    def whole(column: str) -> int | None:
        return int(float(row[column])) if row[column] else None

    dtype = row["weight_dtype"].split(" (")[0]
    total = float(row["gpu_total_gib"]) if row["gpu_total_gib"] else None
    version = re.match(r"\d+\.\d+(\.\d+)?", row["version"])
    engine = "vllm" + (f"@{version.group()}" if version and _known(version.group()) else "")
    drafts = re.search(r"\d+", row["spec_decode"])
    sequences, batched = whole("max_num_seqs"), whole("max_num_batched_tokens")
    if "offline" in row["notes"]:
        limits = _offline_limits(version.group() if version else "", GPUS[row["gpu"]], whole("max_model_len"))
        sequences, batched = sequences or limits[0], batched or limits[1]
    graph = re.search(r"cudagraph size (\d+)", row["notes"])
    model = row["model"].split(" (")[0]
    model = MODELS.get(model, re.sub(r"-autoround-int4$|-nvfp4$|-0731$", "", model))
    return build_deployment(
        model, GPUS[row["gpu"]], tp=whole("tp") or 1, pp=whole("pp") or 1, dp=whole("dp") or 1,
        enable_expert_parallel="EP" in row["notes"], weight_dtype=DTYPES[dtype],
        dtype=dtype if dtype in ("fp32", "fp16") else None,
        kv_cache_dtype=row["kv_dtype"] or None,
        engine=engine, max_num_seqs=sequences, max_num_batched_tokens=batched,
        enforce_eager="eager" in row["notes"], num_speculative_tokens=int(drafts.group()) if drafts else 0,
        cudagraph_max_size=int(graph.group(1)) if graph else None,
        enable_prefix_caching=True if "prefix caching on" in row["notes"] else None,
        max_model_len=whole("max_model_len"),
        gpu_memory_utilization=float(row["gpu_mem_util"]) if row["gpu_mem_util"] else None,
        gpu_memory_bytes=round(total * GIB) if total else None,
    )


def _offline_limits(version: str, gpu: str, length: int | None) -> tuple[int, int]:
    """Batch limits of the class LLM, which differ from the server's."""
    from bstar.catalog.devices import get_device

    return engine_defaults("vllm", version, get_device(gpu), usage="offline").batch_limits(length or 32768)


def _known(version: str) -> bool:
    try:
        from bstar.catalog.devices import get_device

        engine_defaults("vllm", version, get_device("h100"))
    except BstarError:
        return False
    return True
