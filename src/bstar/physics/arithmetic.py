"""In which dtype a device computes: the kernel's own, or the one that engines fall back to.

Engines run narrow weights on devices without the matching tensor cores by dequantizing them on the fly
(vLLM's Marlin kernels): bytes stay narrow, the arithmetic is 16-bit. W8A8-int8 has no such path: it is refused,
also on Blackwell, whose tensor cores multiply int8 and for which no engine has the kernels.
"""

from __future__ import annotations

from typing import Final

from bstar.errors import SpecError
from bstar.specs.device import DeviceSpec

# dtype -> what engines compute it in, best first.
PATHS: Final[dict[str, tuple[str, ...]]] = {
    "fp4": ("fp4", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "int4": ("int4",),
    "int8": ("int8",),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "tf32"),
}


# From this compute capability (× 10) on, vLLM's and SGLang's int8 GEMMs refuse to run (vLLM's documentation of int8:
# "not supported on compute capability >= 10.0").
INT8_KERNELS_END: Final = 100


def missing_kernel(device: DeviceSpec, dtype: str) -> str | None:
    """Why engines cannot multiply in `dtype` on `device` although its datasheet has a peak, else None."""
    if dtype == "int8" and device.vendor == "nvidia" and (device.compute_capability or 0) >= INT8_KERNELS_END:
        return (f"dtype: engines have no kernels for int8 activations (W8A8) on {device.name}; "
                "use an fp8 checkpoint, or int8 weights alone (w8a16)")
    return None


def computed_dtype(device: DeviceSpec, dtype: str) -> str:
    """The dtype whose peak bounds a kernel that wants `dtype` on `device`.

    Raises SpecError where no engine has a path (int8 activations without int8 tensor cores or kernels).
    """
    missing = missing_kernel(device, dtype)
    if missing is not None:
        raise SpecError(missing)
    peaks = device.peak_flops_per_s
    for candidate in PATHS.get(dtype, (dtype,)):
        if candidate in peaks:
            return candidate
    raise SpecError(
        f"dtype: {device.name} has no {dtype} peak in its datasheet and engines have no other path for it; "
        f"it has {', '.join(sorted(peaks))}"
    )


def fallback_note(device: DeviceSpec, dtype: str) -> str | None:
    """One sentence where `dtype` is computed in another dtype on `device`, else None."""
    used = computed_dtype(device, dtype)
    if used == dtype:
        return None
    if dtype in ("fp8", "fp4"):
        return f"{device.name} has no {dtype} tensor cores: weights are dequantized on the fly and computed in {used}"
    return f"{device.name} has no {dtype} peak: computed in {used}"
