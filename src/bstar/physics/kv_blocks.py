"""vLLM's KV blocks: how layers share one pool, how many blocks it has, and what the log says about it.

Layers that keep the same thing form a group with one block table. All groups draw blocks from one pool,
so every group must need the same bytes per block: pages are unified (larger blocks, or padding), and
the more frequent kinds are split into several groups of as many layers as the rarest. A request takes
blocks from every group:

    num_blocks       = available // (bytes of the largest group's block)
    blocks per request of max_model_len tokens = Σ groups  ⌈tokens it keeps / block⌉   (states: 1, or 2)
    max concurrency  = num_blocks / blocks per request
    "KV cache size"  = int(max concurrency · max_model_len) since 0.20.1,
                       before: num_blocks // groups · block size (which misstates models with windows)

Follows vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py, versions 0.11 to 0.32; where they
differ, `KvRules` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from bstar.physics.kv_packed import PackedShare, Packing, packed_members, packed_share
from bstar.physics.kv_pages import Page
from bstar.physics.partition import stage_bounds

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRules:
    """What changed in the block accounting between versions.

    tokens_from_concurrency  the logged size in tokens is concurrency · max_model_len
    wide_group_ratio         a group takes the larger layer count when counts are closer than this factor
    stages_projected         a pipeline stage pays only for its own layers, also when their page sizes differ
    override_checked         the check of max_model_len sees num_gpu_blocks_override
    in_flight_batches        windows reserve for every batch in flight, not for one
    null_block_reserved      the check of max_model_len leaves out the null block
    packed                   how mixed page sizes of compressed attention share a block (`kv_packed`)
    seqs_within_states       more max_num_seqs than blocks is refused when there are states
    state_checkpoints        prefix caching keeps a second state per sequence (the "align" mode)
    prefill_checkpoints      … and a third where the kernel can export it inside a prefill (`Page.checkpoints`)
    """

    tokens_from_concurrency: bool
    wide_group_ratio: float
    stages_projected: bool
    override_checked: bool
    in_flight_batches: bool
    null_block_reserved: bool
    packed: Packing
    seqs_within_states: bool
    state_checkpoints: bool
    prefill_checkpoints: bool


def kv_rules(version: Version) -> KvRules:
    """The rules of a vLLM version (read from the sources of 0.11 … 0.32; an empty version is the newest)."""
    v = version or (99,)
    return KvRules(
        tokens_from_concurrency=v >= (0, 20, 1),
        wide_group_ratio=1.5 if v >= (0, 18) else 1.25 if v >= (0, 12) else 1.0,
        stages_projected=v >= (0, 17),
        override_checked=v >= (0, 20, 1),
        in_flight_batches=v >= (0, 26),
        null_block_reserved=v >= (0, 29),
        packed="widest" if v >= (0, 29) else "padded" if v >= (0, 27) else "slots" if v >= (0, 23) else "tuples",
        seqs_within_states=v >= (0, 20),
        state_checkpoints=v >= (0, 16),
        prefill_checkpoints=v >= (0, 31),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Layers with one block table. `pages` holds one page per layer cache, `layers` their layer indices."""

    pages: tuple[Page, ...]
    layers: tuple[int, ...]

    @property
    def block_tokens(self) -> int:
        return self.pages[0].block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this group, all layers."""
        return sum(p.page_bytes for p in self.pages)

    def on_stage(self, bounds: tuple[int, int]) -> int:
        """Bytes of one block of this group's layers in the pipeline stage [first, end)."""
        first, end = bounds
        return sum(p.page_bytes for p, layer in zip(self.pages, self.layers, strict=True) if first <= layer < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What one request of full length may hold: see `blocks_of_request`."""

    max_model_len: int
    in_flight_tokens: int
    dcp: int = 1
    state_blocks: int = 1
    checkpoints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """The pool of one engine: the smallest rank's blocks, as every rank gets that many.

    bytes_per_block         of the fullest pipeline stage
    room_bytes              what the check of max_model_len may use
    block_tokens            of the group with the smallest block, attention_block_tokens of full attention
    blocks_per_request      of a request of max_model_len tokens
    kv_cache_tokens         as the version logs it
    needed_bytes            what one request of max_model_len tokens needs on the fullest stage
    """

    groups: tuple[BlockGroup, ...]
    bytes_per_block: int
    num_blocks: int
    room_bytes: int
    block_tokens: int
    attention_block_tokens: int
    blocks_per_request: int
    max_concurrency: float
    kv_cache_tokens: int
    needed_bytes: int
    has_states: bool
    share: PackedShare | None = None

    @property
    def holds_one_request(self) -> bool:
        """Whether a request of max_model_len tokens fits, as the engine checks it."""
        return self.needed_bytes <= self.room_bytes


def block_groups(layers: Sequence[Sequence[Page]], rules: KvRules) -> tuple[BlockGroup, ...]:
    """Group the caches of all layers (of the whole model, before pipeline stages) as the engine does."""
    caches = [(index, page) for index, pages in enumerate(layers) for page in pages]
    if not caches:
        return ()
    pages = [page for _, page in caches]
    if one_family(pages):
        return (_group(caches),)
    if len({p.page_bytes for p in pages}) > 1 and any(p.latent and p.window for p in pages):
        groups = tuple(_group(members) for members in packed_members(caches, one_family))
        return groups if rules.packed == "widest" else tuple(_padded(g, groups) for g in groups)
    return _equal_page_groups([(i, p) for (i, _), p in zip(caches, _unify(pages), strict=True)], rules)


def _group(caches: Sequence[tuple[int, Page]]) -> BlockGroup:
    return BlockGroup(pages=tuple(p for _, p in caches), layers=tuple(i for i, _ in caches))


def one_family(pages: Sequence[Page]) -> bool:
    """Whether all caches need the same number of blocks, so that one block table serves them."""
    first = pages[0]
    if any(p.kind != first.kind or p.block_tokens != first.block_tokens for p in pages):
        return False
    if first.kind in ("sliding", "chunked"):
        return all(p.window == first.window for p in pages)
    return first.kind != "state" or all(p.page_bytes == first.page_bytes for p in pages)


def _padded(group: BlockGroup, groups: Sequence[BlockGroup]) -> BlockGroup:
    """Before 0.29 the windowed caches of a packed model are padded to the next page size of the growing ones."""
    sizes = sorted({p.page_bytes for g in groups for p in g.pages if p.kind == "full"})
    pages = tuple(
        replace(p, page_bytes=min((x for x in sizes if x >= p.page_bytes), default=p.page_bytes)) for p in group.pages)
    return replace(group, pages=pages)


def _unify(pages: Sequence[Page]) -> list[Page]:
    """Give every page the largest page's bytes: more tokens per block where that divides, padding otherwise."""
    largest = max(p.page_bytes for p in pages)
    out = []
    for page in pages:
        if page.kind != "state" and largest % page.page_bytes == 0:
            page = replace(page, block_tokens=page.block_tokens * (largest // page.page_bytes))
        out.append(replace(page, page_bytes=largest))
    return out


def _equal_page_groups(caches: Sequence[tuple[int, Page]], rules: KvRules) -> tuple[BlockGroup, ...]:
    buckets: dict[Page, list[tuple[int, Page]]] = {}
    for index, page in caches:
        buckets.setdefault(page, []).append((index, page))
    counts = [len(members) for members in buckets.values()]
    size = min(counts)
    if max(counts) < rules.wide_group_ratio * size:
        size = max(counts)
    groups = []
    for members in buckets.values():
        number = ceil(len(members) / size)
        groups += [_group(members[i::number]) for i in range(number)]
    return tuple(groups)


def blocks_of_request(group: BlockGroup, request: RequestShape) -> int:
    """Blocks that a request of max_model_len tokens may hold in `group` at once."""
    return max(_page_blocks(page, request) for page in set(group.pages))


def _page_blocks(page: Page, request: RequestShape) -> int:
    if page.kind == "state":
        return request.state_blocks + (page.checkpoints if request.checkpoints else 0)
    length = request.max_model_len
    if page.window is None:
        return ceil(ceil(length / request.dcp) / page.block_tokens)
    if page.kind == "chunked":
        return ceil(min(page.window + request.in_flight_tokens, length) / page.block_tokens)
    # The window may start inside a block: one more.
    return ceil(min(page.window - 1 + request.in_flight_tokens, length) / page.block_tokens) + 1


def block_plan(
    groups: tuple[BlockGroup, ...],
    available_bytes: Sequence[int],
    request: RequestShape,
    rules: KvRules,
    *,
    num_layers: int,
    num_blocks_override: int | None = None,
) -> BlockPlan:
    """The pool that fits into `available_bytes`, one figure per pipeline stage (of `num_layers` decoder layers).

    Layers beyond `num_layers` (an MTP head's) lie on the last stage.
    """
    bounds = [*stage_bounds(num_layers, len(available_bytes))]
    bounds[-1] = (bounds[-1][0], 1 << 30)
    share = _packed_share(groups, rules)
    per_block = [max((g.on_stage(b) for g in groups), default=0) for b in bounds]
    if not rules.stages_projected and len({p.page_bytes for g in groups for p in g.pages}) > 1:
        per_block = [max(g.block_bytes for g in groups)] * len(bounds)
    if share is not None:
        per_block = [share.block_bytes] * len(bounds)
    counts = [max(a, 0) // size for a, size in zip(available_bytes, per_block, strict=True) if size]
    num_blocks = room = min(counts, default=0)
    if num_blocks_override is not None:
        num_blocks = num_blocks_override
        room = num_blocks if rules.override_checked else room
    widest = max(per_block, default=0)
    per_request = _blocks_per_request(groups, request, share, rules)
    concurrency = num_blocks / per_request if per_request else 0.0
    attention = [g.block_tokens for g in groups if g.block_tokens]
    block_tokens = min(attention, default=0)
    full = [g.block_tokens for g in groups if g.pages[0].kind == "full"]
    tokens = (
        int(concurrency * request.max_model_len)
        if rules.tokens_from_concurrency
        else num_blocks // max(len(groups), 1) * block_tokens * request.dcp
    )
    return BlockPlan(
        groups=groups, bytes_per_block=widest, num_blocks=num_blocks, block_tokens=block_tokens,
        room_bytes=max(room - rules.null_block_reserved, 0) * widest,
        attention_block_tokens=max(full or attention, default=0),
        blocks_per_request=per_request, max_concurrency=concurrency, kv_cache_tokens=tokens,
        needed_bytes=_needed_bytes(groups, request, widest, share), share=share,
        has_states=any(p.kind == "state" for g in groups for p in g.pages))


def _packed_share(groups: Sequence[BlockGroup], rules: KvRules) -> PackedShare | None:
    """The block of a packed model before 0.29, None for every other."""
    mixed = len({p.page_bytes for g in groups for p in g.pages}) > 1
    if len(groups) < 2 or not mixed or rules.packed == "widest":
        return None
    return packed_share([[p.page_bytes for p in g.pages] for g in groups],
                        [g.pages[0].kind == "full" for g in groups], rules.packed)


def _blocks_per_request(
    groups: Sequence[BlockGroup], request: RequestShape, share: PackedShare | None, rules: KvRules
) -> int:
    taken = [blocks_of_request(g, request) for g in groups]
    if share is None or rules.packed == "padded":
        return sum(taken)
    return ceil(sum(n * g.block_bytes for n, g in zip(taken, groups, strict=True)) / share.full_bytes)


def _needed_bytes(
    groups: Sequence[BlockGroup], request: RequestShape, bytes_per_block: int, share: PackedShare | None
) -> int:
    taken = sum(blocks_of_request(g, request) for g in groups)
    return taken * (bytes_per_block if share is None else share.checked_bytes)


def longest_context(plan: BlockPlan, request: RequestShape, *, upper: int) -> int:
    """The largest max_model_len of which one request fits into the plan's pool (0: none), by bisection."""

    def fits(length: int) -> bool:
        shape = replace(request, max_model_len=length)
        return _needed_bytes(plan.groups, shape, plan.bytes_per_block, plan.share) <= plan.room_bytes

    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
