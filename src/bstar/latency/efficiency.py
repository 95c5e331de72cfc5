"""Which constants an operator of a deployment uses: its kernel, its link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from bstar.errors import SpecError
from bstar.physics.arithmetic import computed_dtype
from bstar.physics.work import Work
from bstar.specs.device import DeviceSpec, LinkSpec
from bstar.specs.engine import EngineSettings
from bstar.specs.formats import FORMATS, KvFormat

LinkKind = Literal["nvlink", "pcie", "network"]

# Weight formats by the class of kernel that multiplies them.
_GEMM_CLASSES = {
    "fp8": "fp8", "fp8_channel": "fp8", "fp8_block": "fp8_block", "mxfp8": "fp8_block", "nvfp4": "fp4",
    "mxfp4_w4a4": "fp4", "int8": "int8",
}  # fmt: skip


def gemm_class(weight_format: str, bits: int, computed: str, wanted: str) -> str:
    """The class of a GEMM's kernel: by format, `weight_only` where narrow weights are computed in 16 bits."""
    if weight_format == "mxfp4":
        return "mxfp4_a8" if computed == "fp8" else "mxfp4_a16"
    if bits < 16 and (wanted in ("bf16", "fp16", "fp32") or computed != wanted):
        return "weight_only"
    return _GEMM_CLASSES.get(weight_format, "bf16")


def kernel_dtype(work: Work, device: DeviceSpec) -> str | None:
    """The dtype whose peak bounds a work's kernel on `device`, None where there is no arithmetic to speak of.

    Experts in MXFP4 are multiplied with MXFP8 activations from Blackwell's data-centre chips on (the kernels that
    vLLM, SGLang and TensorRT-LLM take there), with 16-bit ones elsewhere.
    """
    if work.compute_dtype is None:
        return None
    if work.weight_format == "mxfp4" and device.compute_capability in (100, 103) and "fp8" in device.peak_flops_per_s:
        return "fp8"
    return computed_dtype(device, work.compute_dtype)


# Engines whose decode attention ran on CUDA cores: before which version, but for the group of query heads per cached
# head that had a kernel for tensor cores. TensorRT-LLM 0.9: its XQA kernels are compiled for groups of 8
# (xqa …_nqpkv_8_…), every other model takes the masked multi-head attention kernel.
_SCALAR_ATTENTION: Final[dict[str, tuple[tuple[int, ...], int]]] = {"trtllm": ((0, 10), 8)}


def kernel_family(
    work: Work, kv: KvFormat, computed: str | None, *, engine: EngineSettings | None = None, group: int = 1
) -> str:
    """The family of constants of a work's kernel ("gemm.fp8", "attention_decode.wide", …); not of a collective.

    computed   `kernel_dtype` of the work
    group      query heads per cached head on a rank, of decode attention
    """
    if work.kind in ("gemm", "moe_gemm"):
        fmt = FORMATS.get(work.weight_format)
        kind = gemm_class(work.weight_format, fmt.bits if fmt else 16, computed or "", work.compute_dtype or "")
        return f"{work.kind}.{kind}"
    if work.kind == "attention_decode":
        if work.form == "latent":
            return "attention_decode.latent"
        until, on_tensor_cores = _SCALAR_ATTENTION.get(engine.name if engine else "", ((), 0))
        if engine is not None and () < engine.version_tuple < until and group != on_tensor_cores:
            return "attention_decode.scalar"
        return "attention_decode.narrow" if kv.bits < 16 or work.form == "index" else "attention_decode.wide"
    if work.kind == "attention_prefill":
        return "attention_prefill"
    return "state" if work.kind == "state" else "elementwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """A link as collectives see it: the kind of its constants, and its bandwidth (one direction, per device)."""

    kind: LinkKind
    bandwidth_bytes_per_s: float


def link_for(device: DeviceSpec, ranks: int) -> LinkUse:
    """The slowest link that `ranks` neighbouring devices have to cross. Raises SpecError where it is not known."""
    inside = ranks <= device.devices_per_node
    link: LinkSpec | None = device.link_between(ranks)
    if link is None:
        where = "between the GPUs of a node" if inside else f"between nodes ({device.devices_per_node} GPUs each)"
        raise SpecError(f"link: {device.name} has no link {where} in the catalog; {ranks} GPUs cannot work together")
    kind: LinkKind = "network" if not inside else ("pcie" if link.kind.startswith("pcie") else "nvlink")
    return LinkUse(kind=kind, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)
