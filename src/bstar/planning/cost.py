"""What a plan costs: USD per hour, and per million output tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bstar.errors import SpecError
from bstar.specs.device import DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """None where the price of the device is not known."""

    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    usd_per_gpu_hour: float | None = None
    source: str = ""

    def to_dict(self) -> dict[str, float | str | None]:
        return {
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice:
    """USD per GPU and hour and where it is from; None: not known."""

    usd_per_hour: float | None
    source: str


def is_named(device: DeviceSpec, name: str) -> bool:
    """Whether `name` is an id, a name or an alias of `device`, in any case."""
    return name.strip().lower() in {n.lower() for n in (device.id, device.name, *device.aliases)}


def gpu_price(device: DeviceSpec, prices: Mapping[str, float]) -> GpuPrice:
    """The user's price of `device` (by id or alias), else the catalog's, else none."""
    for name, value in prices.items():
        if is_named(device, name):
            if not 0 <= value < float("inf"):
                raise SpecError(f"price {name}: must be a price per GPU and hour of at least 0, is {value}")
            return GpuPrice(usd_per_hour=float(value), source="--price")
    if device.price is not None:
        return GpuPrice(
            usd_per_hour=device.price.usd_per_hour, source=f"{device.price.source} ({device.price.date})"
        )
    ask = f"no price of {device.id} is known; give one with --price {device.id}=USD"
    return GpuPrice(usd_per_hour=None, source=ask)


def cost_of(price: GpuPrice, num_gpus: int, output_tokens_per_s: float) -> Cost:
    """Cost of `num_gpus` that make `output_tokens_per_s` together."""
    if price.usd_per_hour is None:
        return Cost(usd_per_hour=None, usd_per_million_output_tokens=None, source=price.source)
    per_hour = price.usd_per_hour * num_gpus
    per_million = per_hour / (output_tokens_per_s * 3600.0) * 1e6 if output_tokens_per_s > 0 else None
    return Cost(
        usd_per_hour=per_hour, usd_per_million_output_tokens=per_million, usd_per_gpu_hour=price.usd_per_hour,
        source=price.source,
    )  # fmt: skip
