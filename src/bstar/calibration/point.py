"""A measured point: what was deployed, what load it had, what was measured. SI units, as its row says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Schema = Literal["serving", "latency"]

@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The prefill or the decode side of a disaggregated row; None where the row does not say.

    workers      engines of that side
    batch_size   as labelled by the row (its meaning differs by source)
    """

    workers: int | None
    tp: int
    pp: int
    attention_dp: int
    moe_tp: int | None
    moe_ep: int | None
    batch_size: int | None

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tp * self.pp * self.attention_dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of a file of measured points.

    schema           "serving": columns of measured_serving_points.csv; "latency": of measured_latency_points.csv
    mode             "agg", or "disagg": `prefill` and `decode` are its two sides
    harness          "inferencex" (its load is known), or another name
    weight_dtype     None: the row does not say, the checkpoint's own
    input_tokens     nominal or mean prompt length (the harness may draw shorter ones); output_tokens likewise
    concurrency      clients of the closed loop
    ttft_s, tpot_s   measured means; None where the row has none
    output_tokens_per_s   measured, of the whole system (latency rows of the largest load have nothing else)
    layout_note, label_note   what is uncertain about the row's labels; empty: nothing
    doubts           labels of the row that contradict each other, and what was made of them
    columns          the row as it stands in the file
    fault            why the row cannot be read, with its column; None: it can
    """

    id: str
    schema: Schema = "serving"
    mode: str = "agg"
    harness: str = ""
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    gpu: str = ""
    weight_dtype: str | None = None
    gemm_dtype: str | None = None
    moe_dtype: str | None = None
    kv_dtype: str | None = None
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    concurrency: int = 0
    num_gpus: int | None = None
    attention_tp: int | None = None
    attention_dp: int | None = None
    expert_parallel: int | None = None
    prefill: Pool | None = None
    decode: Pool | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens_per_s: float | None = None
    layout_note: str = ""
    label_note: str = ""
    doubts: tuple[str, ...] = ()
    measured_on: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False, hash=False)
    fault: str | None = None

    @property
    def is_disaggregated(self) -> bool:
        return self.mode.startswith("disagg")

    @property
    def counts(self) -> bool:
        """Whether the row counts in error figures: nothing about its labels is uncertain.

        A repaired label, and a blank dtype that fits, are not uncertain.
        """
        certain = not self.label_note and not self.doubts and "uncertain" not in self.layout_note
        return self.fault is None and certain

    @property
    def group(self) -> tuple[str, str, str]:
        """(GPU, engine, model) as labelled: what cross-validation holds out together."""
        return self.gpu.lower(), self.engine.lower(), self.model.rpartition("/")[2].lower()
