"""Parameter counts of vision towers with their projectors, by mechanism.

A tower is one block of weights to bstar: it takes memory, is never streamed by a decode step and has no
cache. So only its size is described, exactly as transformers 5.19 builds it.
"""

from __future__ import annotations

from bstar.codec.hf_config.audio import phi4_audio
from bstar.codec.hf_config.reader import MAX_LAYERS, Reader
from bstar.codec.hf_config.towers import layer_count, linear, scalar, square, transformer_block

# -- Qwen ------------------------------------------------------------------------------------------


def qwen2_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen2-VL: plain blocks with biases; four patches merge into one token."""
    h = r.size("embed_dim")
    patch = r.size("in_channels", "in_chans") * scalar(r, "temporal_patch_size") * square(r, "patch_size")
    width = int(h * r.number("mlp_ratio", default=4.0))
    merged = h * square(r, "spatial_merge_size")
    merger = 2 * h + linear(merged, merged) + linear(merged, r.size("hidden_size"))
    return patch * h + layer_count(r, "depth") * transformer_block(h, width) + merger


def qwen2_5_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen2.5-VL: RMS norms and gated FFNs."""
    h = r.size("hidden_size")
    patch = r.size("in_channels", "in_chans") * scalar(r, "temporal_patch_size") * square(r, "patch_size")
    merged = h * square(r, "spatial_merge_size")
    merger = h + linear(merged, merged) + linear(merged, r.size("out_hidden_size"))
    block = transformer_block(h, r.size("intermediate_size"), norm_bias=False, gated=True)
    return patch * h + layer_count(r, "depth") * block + merger


def qwen3_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen3-VL, Qwen3.5: learned positions, and a further merger for each deepstack layer."""
    h, out = r.size("hidden_size"), r.size("out_hidden_size")
    patch = r.size("in_channels") * scalar(r, "temporal_patch_size") * square(r, "patch_size")
    merged = h * square(r, "spatial_merge_size")
    projector = linear(merged, merged) + linear(merged, out)
    deep = len(r.items("deepstack_visual_indexes") or ())
    return (linear(patch, h) + r.size("num_position_embeddings") * h
            + layer_count(r, "depth") * transformer_block(h, r.size("intermediate_size"))
            + projector + 2 * h + deep * (projector + 2 * merged))


# -- GLM -------------------------------------------------------------------------------------------


def glm4v(r: Reader, top: Reader, text_hidden: int) -> int:
    """GLM-4.1V, 4.5V, 4.6V: RMS norms, gated FFNs without biases, a strided merge and a gated merger."""
    h, out = r.size("hidden_size"), r.size("out_hidden_size")
    patch = r.size("in_channels") * scalar(r, "temporal_patch_size") * square(r, "patch_size")
    side = scalar(r, "image_size") // scalar(r, "patch_size")
    bias = r.flag("attention_bias", default=False)
    block = transformer_block(h, out, norm_bias=False, attention_bias=bias, out_bias=False, gated=True, ffn_bias=False)
    width = r.size("intermediate_size")
    merger = out * out + 2 * out + 3 * out * width
    downsample = linear(h * square(r, "spatial_merge_size"), out)
    return linear(patch, h) + side * side * h + layer_count(r, "depth") * block + merger + downsample + 2 * h


def glm5_next(r: Reader, top: Reader, text_hidden: int) -> int:
    """GLM5-Next's tower: norms on queries and keys, biases by switch, the merger of GLM-4V."""
    h, out, bias = r.size("hidden_size"), r.size("out_hidden_size"), r.flag("attention_bias")
    patch = r.size("in_channels") * scalar(r, "temporal_patch_size") * square(r, "patch_size")
    width = r.size("intermediate_size")
    block = transformer_block(h, width, norm_bias=False, attention_bias=bias, gated=True, ffn_bias=bias)
    block += 2 * (h // r.size("num_heads"))
    merger = out * out + 2 * out + 3 * out * r.size("projection_intermediate_size")
    downsample = linear(h * square(r, "spatial_merge_size"), out)
    return linear(patch, h) + layer_count(r, "depth") * block + merger + downsample + h


# -- SigLIP and Gemma ------------------------------------------------------------------------------


def siglip(r: Reader, *, flat_patches: bool = False, head: bool = True) -> int:
    """A SigLIP tower: biases everywhere, learned positions, an attention-pooling head unless switched off."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    patch = r.size("num_channels") * square(r, "patch_size")
    positions = (r.size("num_patches") if flat_patches
                 else (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2)
    layers = layer_count(r, "num_hidden_layers")
    total = linear(patch, h) + positions * h + layers * transformer_block(h, width) + 2 * h
    if head and r.flag("vision_use_head", default=True):
        ffn = linear(h, width) + linear(width, h)
        total += h + linear(h, 3 * h) + linear(h, h) + 2 * h + ffn
    return total


def gemma3(r: Reader, top: Reader, text_hidden: int) -> int:
    """Gemma 3: SigLIP, one projection behind a norm."""
    h = r.size("hidden_size")
    return siglip(r) + h * text_hidden + h


def gemma4(r: Reader, top: Reader, text_hidden: int) -> int:
    """Gemma 4's own tower: two position tables, per-head q and k norms, four norms, gated FFNs."""
    h, heads = r.size("hidden_size"), r.size("num_attention_heads")
    dim = r.size("head_dim", default=h // heads)
    kv = r.size("num_key_value_heads", default=heads)
    bias = r.flag("attention_bias")
    attention = (linear(h, heads * dim, bias) + 2 * linear(h, kv * dim, bias) + linear(heads * dim, h, bias) + 2 * dim)
    block = attention + 3 * h * r.size("intermediate_size") + 4 * h
    patch = 3 * square(r, "patch_size")
    return (2 * r.size("position_embedding_size") * h + patch * h + layer_count(r, "num_hidden_layers") * block
            + h * text_hidden)


def phi4_multimodal(top: Reader, text_hidden: int) -> int:
    """Phi-4-multimodal: SigLIP with two separators, a Conformer, a projector for each way of speech."""
    image = Reader(top.child("vision_config") or {}, "phi4_multimodal_vision", path="vision_config.")
    audio = Reader(top.child("audio_config") or {}, "phi4_multimodal_audio", path="audio_config.")
    h = image.size("hidden_size")
    crop = image.size("crop_size", default=448, high=1 << 16)
    positions = (crop // scalar(image, "patch_size")) ** 2
    own = (scalar(image, "image_size", default=crop) // scalar(image, "patch_size")) ** 2
    tower = siglip(image) + (positions - own) * h
    projector = linear(h, text_hidden) + linear(text_hidden, text_hidden)
    return tower + 2 * h + projector + phi4_audio(audio, text_hidden)


def intern_vit(r: Reader, top: Reader, text_hidden: int) -> int:
    """InternViT with InternVL's own code: layer scales, biases by switch, pixel shuffle, a two-layer projector."""
    h = r.size("hidden_size")
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2 + 1
    patch = linear(r.size("num_channels", default=3) * square(r, "patch_size"), h)
    rms = r.text("norm_type", default="rms_norm") == "rms_norm"
    block = transformer_block(h, r.size("intermediate_size"), norm_bias=not rms, attention_bias=r.flag("qkv_bias"),
                   out_bias=True) + 2 * h
    if r.flag("qk_normalization", default=False):
        block += 2 * h
    merged = h * round(1 / max(top.number("downsample_ratio", default=0.5), 1 / 64)) ** 2
    projector = 2 * merged + linear(merged, text_hidden) + linear(text_hidden, text_hidden)
    return patch + h + positions * h + layer_count(r, "num_hidden_layers") * block + projector


# -- CLIP and SigLIP with plain projectors ---------------------------------------------------------


def clip(r: Reader) -> int:
    """A CLIP tower: a class token, learned positions, norms before and after."""
    h = r.size("hidden_size")
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2 + 1
    patch = r.size("num_channels") * square(r, "patch_size") * h
    block = transformer_block(h, r.size("intermediate_size"))
    return patch + h + positions * h + 4 * h + layer_count(r, "num_hidden_layers") * block


def _any_tower(r: Reader) -> tuple[int, int]:
    """(parameters, width) of the tower that a LLaVA-like vision_config names."""
    kind = r.text("model_type", default="clip_vision_model")
    if kind == "clip_vision_model":
        return clip(r), r.size("hidden_size")
    if kind == "siglip_vision_model":
        return siglip(r), r.size("hidden_size")
    if kind == "pixtral":
        return pixtral(r), r.size("hidden_size")
    raise r.fail("model_type", f"is {kind[:40]!r}; known are clip_vision_model, siglip_vision_model, pixtral")


def llava(r: Reader, top: Reader, text_hidden: int) -> int:
    """LLaVA: any tower, a two-layer projector (over several layers' features where they are listed)."""
    parameters, width = _any_tower(r)
    layers = top.find("vision_feature_layer")
    inputs = width * (len(layers) if isinstance(layers, list) and layers else 1)
    bias = top.flag("multimodal_projector_bias", default=True)
    return parameters + linear(inputs, text_hidden, bias) + linear(text_hidden, text_hidden, bias)


def llava_next(r: Reader, top: Reader, text_hidden: int) -> int:
    """LLaVA-NeXT, LLaVA-OneVision: and a learned newline."""
    return llava(r, top, text_hidden) + text_hidden


def lfm2_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """LFM2-VL: SigLIP 2 (patches given flat), pixel unshuffle, a two-layer projector behind a norm."""
    merged = r.size("hidden_size") * top.size("downsample_factor", default=2) ** 2
    width, bias = top.size("projector_hidden_size", default=2560), top.flag("projector_bias", default=True)
    norm = 2 * merged if top.flag("projector_use_layernorm", default=True) else 0
    return siglip(r, flat_patches=True) + norm + linear(merged, width, bias) + linear(width, text_hidden, bias)


# -- Pixtral ---------------------------------------------------------------------------------------


def pixtral(r: Reader) -> int:
    """Pixtral: RMS norms, gated FFNs, no biases, rotary positions."""
    h = r.size("hidden_size")
    width = r.size("intermediate_size")
    block = transformer_block(h, width, norm_bias=False, attention_bias=False, gated=True, ffn_bias=False)
    return r.size("num_channels") * square(r, "patch_size") * h + h + layer_count(r, "num_hidden_layers") * block


def mistral3(r: Reader, top: Reader, text_hidden: int) -> int:
    """Mistral 3: Pixtral, patches merged, a two-layer projector."""
    h = r.size("hidden_size")
    merged = h * top.size("spatial_merge_size", default=2) ** 2
    bias = top.flag("multimodal_projector_bias")
    return pixtral(r) + h + merged * h + linear(h, text_hidden, bias) + linear(text_hidden, text_hidden, bias)


# -- Kimi, Step, Llama, InternVL -------------------------------------------------------------------


def moonvit(r: Reader, top: Reader, text_hidden: int) -> int:
    """MoonViT of Kimi-VL and Kimi K2.5: a position grid, plain blocks with biases, a patch-merging projector."""
    h = r.size("vt_hidden_size", "hidden_size", default=1152)
    width = r.size("vt_intermediate_size", "intermediate_size", default=4304)
    layers = r.size("vt_num_hidden_layers", "num_hidden_layers", default=27, high=MAX_LAYERS)
    grid = r.size("init_pos_emb_height", "pos_emb_height", default=64) * r.size(
        "init_pos_emb_width", "pos_emb_width", default=64)
    merge = r.find("merge_kernel_size") or [2, 2]
    if not isinstance(merge, list) or len(merge) != 2:
        raise r.fail("merge_kernel_size", "must be a pair of numbers")
    rows, columns = (r.whole("merge_kernel_size", x, low=1, high=64) for x in merge)
    cells = rows * columns
    patch = 3 * square(r, "patch_size", default=14)
    pre_norm = top.size("projection_hidden_size", default=h)
    projector = 2 * pre_norm + linear(h * cells, h * cells) + linear(h * cells, text_hidden)
    return linear(patch, h) + grid * h + layers * transformer_block(h, width) + 2 * h + projector


def minimax_m3(r: Reader, top: Reader, text_hidden: int) -> int:
    """MiniMax M3's tower: plain blocks with biases, a projector before and one after the merge of patches."""
    h = r.size("hidden_size")
    merge = top.child("img_token_compression_config") or r.child("img_token_compression_config") or {}
    temporal, side = (r.whole(key, merge.get(key, r.find(key) or 2), low=1, high=64)
                      for key in ("temporal_patch_size", "spatial_merge_size"))
    patch = r.size("num_channels", "in_channels", default=3) * temporal * square(r, "patch_size") * h
    width = top.size("projector_hidden_size", default=text_hidden)
    projector = (linear(h, width) + linear(width, text_hidden) + linear(text_hidden * side * side, width)
                 + linear(width, text_hidden))
    block = transformer_block(h, r.size("intermediate_size"))
    return patch + 2 * h + layer_count(r, "num_hidden_layers") * block + projector


def cohere2(r: Reader, top: Reader, text_hidden: int) -> int:
    """Command A Vision: SigLIP, pixel shuffle, a gated projector."""
    merged = r.size("hidden_size") * top.size("downsample_factor", default=2) ** 2
    width = top.size("alignment_intermediate_size", default=36864)
    return siglip(r) + linear(merged, width) + linear(width // 2, text_hidden)


def aya(r: Reader, top: Reader, text_hidden: int) -> int:
    """Aya Vision: SigLIP, pixel shuffle, a norm and a gated projector."""
    merged = r.size("hidden_size") * top.size("downsample_factor", default=2) ** 2
    width = top.size("alignment_intermediate_size", default=text_hidden)
    return siglip(r) + 2 * merged + linear(merged, width) + linear(width // 2, text_hidden)


def idefics3(r: Reader, top: Reader, text_hidden: int) -> int:
    """Idefics 3, SmolVLM: SigLIP's blocks without its head, pixel shuffle, one projection."""
    merged = r.size("hidden_size") * top.size("scale_factor", default=2) ** 2
    return siglip(r, head=False) + merged * text_hidden


def exaone4_5(r: Reader, top: Reader, text_hidden: int) -> int:
    """EXAONE 4.5: Qwen2.5-VL's tower with grouped K and V heads."""
    h, heads = r.size("hidden_size"), r.size("num_heads", "num_attention_heads")
    kv = r.size("num_key_value_heads", default=heads)
    fewer = 2 * (heads - kv) * (h // heads)  # rows that K and V lack against full heads
    return qwen2_5_vl(r, top, text_hidden) - layer_count(r, "depth") * fewer * (h + 1)


def step3(r: Reader, top: Reader, text_hidden: int) -> int:
    """Step-3's tower, as vLLM 0.32 builds it: plain blocks with biases, two convolutions, one projection."""
    h, out = r.size("hidden_size"), r.size("output_hidden_size")
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2 + 1
    patch = linear(r.size("num_channels", default=3) * square(r, "patch_size"), h)
    downsample = linear(4 * h, out) + linear(9 * out, 2 * out)
    return (patch + h + positions * h + layer_count(r, "num_hidden_layers")
            * transformer_block(h, r.size("intermediate_size")) + downsample
            + linear(2 * out, text_hidden, top.flag("projector_bias", default=True)))


def step3p5(r: Reader, top: Reader, text_hidden: int) -> int:
    """Step-3.5/3.7's tower: layer scales, two strided convolutions, one projection."""
    h = r.size("width", "hidden_size")
    width = int(h * r.number("mlp_ratio", default=4.0))
    layers = r.size("layers", "num_hidden_layers", high=MAX_LAYERS)
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2
    patch = r.size("num_channels", default=3) * square(r, "patch_size") * h
    block = transformer_block(h, width) + 2 * h
    downsample = linear(9 * h, 2 * h) + linear(9 * 2 * h, 4 * h)
    return (patch + positions * h + 2 * h + layers * block + downsample
            + linear(4 * h, text_hidden, top.flag("projector_bias", default=False)))


def llama4(r: Reader, top: Reader, text_hidden: int) -> int:
    """Llama 4's tower: a class token, plain blocks with biases, pixel shuffle, a projector without biases."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2 + 1
    patch = r.size("num_channels") * square(r, "patch_size") * h
    inner, out = r.size("projector_input_dim"), r.size("projector_output_dim")
    adapter = width * inner + inner * out
    return (patch + h + positions * h + 4 * h + layer_count(r, "num_hidden_layers") * transformer_block(h, width)
            + adapter + r.size("vision_output_dim") * text_hidden)


def mllama(r: Reader, top: Reader, text_hidden: int) -> int:
    """Llama 3.2 Vision's tower: local and gated global layers, tile and aspect-ratio embeddings."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = (scalar(r, "image_size") // scalar(r, "patch_size")) ** 2 + 1
    tiles = r.size("max_num_tiles", high=64)
    ratios = len(r.items("supported_aspect_ratios") or [0] * 8) + 1
    block = transformer_block(h, width, attention_bias=False)
    embeddings = (r.size("num_channels") * square(r, "patch_size") * h + h + 1 + positions * h
                  + ratios * tiles * positions * h + 2 * (1 + ratios * tiles * h) + 4 * h)
    layers = layer_count(r, "num_hidden_layers") * block + layer_count(r, "num_global_layers") * (block + 2)
    return embeddings + layers + linear(r.size("vision_output_dim"), text_hidden)


def internvl(r: Reader, top: Reader, text_hidden: int) -> int:
    """InternVL (the transformers form): layer scales, biases by switch, pixel shuffle, a two-layer projector."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = square(r, "image_size") // square(r, "patch_size") + 1
    patch = linear(r.size("num_channels") * square(r, "patch_size"), h)
    block = transformer_block(h, width, attention_bias=r.flag("attention_bias"), out_bias=True) + 2 * h
    if r.flag("use_qk_norm", default=False):
        block += 2 * h
    norm = 0 if r.flag("use_mean_pooling", default=True) else 2 * h
    table = positions * h if r.flag("use_absolute_position_embeddings", default=True) else 0
    mask = h if r.flag("use_mask_token", default=False) else 0
    merged = h * round(1 / max(top.number("downsample_ratio", default=0.5), 1 / 64)) ** 2
    projector = 2 * merged + linear(merged, text_hidden) + linear(text_hidden, text_hidden)
    return patch + h + table + mask + layer_count(r, "num_hidden_layers") * block + norm + projector
