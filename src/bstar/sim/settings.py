"""What the scheduler of one engine is told: vLLM's scheduler and cache settings, resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from bstar.errors import SpecError

_LABELS: Final = frozenset({"name", "kind", "note", "comment", "version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Names are vLLM's. num_blocks counts the null block.

    scheduler_reserve_full_isl   a waiting request is admitted only when its whole prompt finds blocks
    max_num_active_seqs          running requests at which admission stops; None: max_num_seqs
    max_num_scheduled_tokens     token budget of a step; None: max_num_batched_tokens
    watermark_fraction           blocks that an admission must leave free, of num_blocks
    async_scheduling             a step is planned while the one before it runs: arrivals join and finished
                                 requests leave one step later
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = True
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    watermark_fraction: float = 0.0
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _whole(name, getattr(self, name), 1)
        _whole("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in ("max_num_active_seqs", "max_num_scheduled_tokens"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.policy not in ("fcfs", "priority"):
            raise SpecError(f"policy: must be fcfs or priority, is {self.policy!r}")
        if not 0 <= self.watermark_fraction < 1:
            raise SpecError(f"watermark: must be a fraction in [0, 1), is {self.watermark_fraction!r}")

    @property
    def token_budget(self) -> int:
        """Tokens that one step may schedule."""
        return min(self.max_num_batched_tokens, self.max_num_scheduled_tokens or self.max_num_batched_tokens)

    @property
    def seat_limit(self) -> int:
        """Running requests at which admission stops."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark_fraction * self.num_blocks)

    @classmethod
    def from_case(cls, engine: dict[str, Any]) -> SchedulerSettings:
        """From the `engine` of a scheduler case.

        Labels, and unknown settings that are off, are ignored. Raises SpecError on an unknown one that is on.
        """
        given = dict(engine)
        if "watermark" in given:
            given["watermark_fraction"] = given.pop("watermark")
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        active = [name for name in unknown if given[name] and name not in _LABELS]
        if active:
            raise SpecError(f"engine: unknown setting {active[0]!r}; a case has vLLM's scheduler settings")
        for name in unknown:
            del given[name]
        try:
            return cls(**given)
        except TypeError as error:
            raise SpecError(f"engine: {error}") from None


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name}: must be a whole number of at least {least}, is {value!r}")
