"""Steps that are replayed from CUDA graphs: which, and to what batch they are padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstar.catalog.engines import engine_defaults
from bstar.errors import BstarError
from bstar.specs.deployment import Deployment

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphUse:
    """Captured batch sizes in tokens of one rank, ascending (empty: every step is launched from the host).

    mixed    steps with prompt tokens are replayed too (in pieces, attention between them) up to the largest size
    pieces   decode steps too are replayed in pieces
    """

    sizes: FloatArray
    mixed: bool
    pieces: bool

    @property
    def largest(self) -> float:
        return float(self.sizes[-1]) if self.sizes.size else 0.0

    def beyond(self, tokens: FloatArray | float) -> NDArray[np.bool_]:
        """Whether a step of `tokens` is larger than any that was captured (means may be off by rounding)."""
        return np.asarray(tokens) > self.largest * (1.0 + 1e-9)

    def padded(self, tokens: FloatArray | float) -> FloatArray:
        """Tokens that a replayed step computes: the next captured size; beyond the largest, the tokens themselves."""
        t = np.asarray(tokens, dtype=float)
        if not self.sizes.size:
            return t
        at = np.searchsorted(self.sizes, t * (1.0 - 1e-9))
        padded = np.where(self.beyond(t), t, self.sizes[np.minimum(at, self.sizes.size - 1)])
        return np.where(t > 0, padded, t)


def graph_use(deployment: Deployment) -> GraphUse:
    """What the engine of `deployment` captures."""
    engine = deployment.engine
    largest = engine.cudagraph_max_size
    if engine.enforce_eager or largest <= 0:
        return GraphUse(sizes=np.empty(0), mixed=False, pieces=False)
    query = 1 + engine.num_speculative_tokens
    try:
        defaults = engine_defaults(engine.name, engine.version, deployment.device, strict=False)
    except BstarError:  # an engine or device that has no defaults: powers of two, then eights
        sizes = {1, 2, 4, *range(8, largest + 1, 8), largest}
    else:
        rule = replace(defaults, cudagraph_cap=largest)
        sizes = {*rule.cudagraph_sizes(max(largest, engine.max_num_seqs), max(largest, engine.max_num_batched_tokens),
                                       query_tokens=query), largest}  # fmt: skip
    kept = np.array(sorted(size for size in sizes if 0 < size <= largest), dtype=float)
    mode = engine.cudagraph_mode
    return GraphUse(sizes=kept, mixed=mode in ("full_and_piecewise", "piecewise"), pieces=mode == "piecewise")
