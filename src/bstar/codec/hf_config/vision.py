"""Parameter counts of vision and audio towers with their projectors, by mechanism.

A tower is one block of weights to bstar: it takes memory, is never streamed by a decode step and has no
cache. So only its size is described, exactly as transformers 5.19 builds it.
"""

from __future__ import annotations

from collections.abc import Callable

from bstar.codec.hf_config.reader import MAX_LAYERS, Reader

# (the tower's config, the whole config, the text model's hidden size) -> parameters
Tower = Callable[[Reader, Reader, int], int]


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def square(r: Reader, key: str, *, default: int | None = None) -> int:
    """Area of a size that is a number or a [height, width] pair."""
    value = r.find(key)
    if isinstance(value, list):
        if len(value) != 2:
            raise r.fail(key, "must be a number or a pair of numbers")
        return r.whole(key, value[0], low=1, high=1 << 16) * r.whole(key, value[1], low=1, high=1 << 16)
    return r.size(key, default=default, high=1 << 16) ** 2


def _scalar(r: Reader, key: str, *, default: int | None = None) -> int:
    """A size that may be written as a list of one or two equal numbers."""
    value = r.find(key)
    if isinstance(value, list) and value:
        return r.whole(key, value[0], low=1, high=1 << 16)
    return r.size(key, default=default, high=1 << 16)


def _block(h: int, width: int, *, norm_bias: bool = True, attention_bias: bool = True, out_bias: bool | None = None,
           gated: bool = False, ffn_bias: bool = True, norms: int = 2) -> int:
    """One transformer block: norms, q k v and output, a gated or plain FFN."""
    attention = 3 * linear(h, h, attention_bias) + linear(h, h, attention_bias if out_bias is None else out_bias)
    ffn = (2 if gated else 1) * linear(h, width, ffn_bias) + linear(width, h, ffn_bias)
    return attention + ffn + norms * (2 * h if norm_bias else h)


def _depth(r: Reader, *keys: str) -> int:
    return r.size(*keys, low=0, high=MAX_LAYERS)


# -- Qwen ------------------------------------------------------------------------------------------


def qwen2_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen2-VL: plain blocks with biases; four patches merge into one token."""
    h = r.size("embed_dim")
    patch = r.size("in_channels", "in_chans") * _scalar(r, "temporal_patch_size") * square(r, "patch_size")
    width = int(h * r.number("mlp_ratio", default=4.0))
    merged = h * square(r, "spatial_merge_size")
    merger = 2 * h + linear(merged, merged) + linear(merged, r.size("hidden_size"))
    return patch * h + _depth(r, "depth") * _block(h, width) + merger


def qwen2_5_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen2.5-VL: RMS norms and gated FFNs."""
    h = r.size("hidden_size")
    patch = r.size("in_channels", "in_chans") * _scalar(r, "temporal_patch_size") * square(r, "patch_size")
    merged = h * square(r, "spatial_merge_size")
    merger = h + linear(merged, merged) + linear(merged, r.size("out_hidden_size"))
    block = _block(h, r.size("intermediate_size"), norm_bias=False, gated=True)
    return patch * h + _depth(r, "depth") * block + merger


def qwen3_vl(r: Reader, top: Reader, text_hidden: int) -> int:
    """Qwen3-VL, Qwen3.5: learned positions, and a further merger for each deepstack layer."""
    h, out = r.size("hidden_size"), r.size("out_hidden_size")
    patch = r.size("in_channels") * _scalar(r, "temporal_patch_size") * square(r, "patch_size")
    merged = h * square(r, "spatial_merge_size")
    projector = linear(merged, merged) + linear(merged, out)
    deep = len(r.items("deepstack_visual_indexes") or ())
    return (linear(patch, h) + r.size("num_position_embeddings") * h
            + _depth(r, "depth") * _block(h, r.size("intermediate_size"))
            + projector + 2 * h + deep * (projector + 2 * merged))


def qwen2_5_audio(r: Reader, text_hidden: int) -> int:
    """Qwen2.5-Omni's audio tower: two convolutions, Whisper's layers (no bias on K), one projection."""
    h, out = r.size("d_model"), r.size("output_dim")
    block = _block(h, r.size("encoder_ffn_dim")) - h
    front = linear(3 * r.size("num_mel_bins"), h) + linear(3 * h, h) + 2 * out
    return front + _depth(r, "encoder_layers") * block + 2 * h + linear(h, out)


def qwen3_audio(r: Reader, text_hidden: int) -> int:
    """Qwen3-Omni's audio tower: three strided convolutions, Whisper's layers, two projections."""
    h, out, c = r.size("d_model"), r.size("output_dim"), r.size("downsample_hidden_size")
    bands = r.size("num_mel_bins")
    for _ in range(3):
        bands = (bands + 1) // 2
    front = 10 * c + 2 * linear(9 * c, c) + c * bands * h
    return (front + _depth(r, "encoder_layers") * _block(h, r.size("encoder_ffn_dim")) + 2 * h + linear(h, h)
            + linear(h, out))


# -- GLM -------------------------------------------------------------------------------------------


def glm4v(r: Reader, top: Reader, text_hidden: int) -> int:
    """GLM-4.1V, 4.5V, 4.6V: RMS norms, gated FFNs without biases, a strided merge and a gated merger."""
    h, out = r.size("hidden_size"), r.size("out_hidden_size")
    patch = r.size("in_channels") * _scalar(r, "temporal_patch_size") * square(r, "patch_size")
    side = _scalar(r, "image_size") // _scalar(r, "patch_size")
    bias = r.flag("attention_bias", default=False)
    block = _block(h, out, norm_bias=False, attention_bias=bias, out_bias=False, gated=True, ffn_bias=False)
    width = r.size("intermediate_size")
    merger = out * out + 2 * out + 3 * out * width
    downsample = linear(h * square(r, "spatial_merge_size"), out)
    return linear(patch, h) + side * side * h + _depth(r, "depth") * block + merger + downsample + 2 * h


def glm5_next(r: Reader, top: Reader, text_hidden: int) -> int:
    """GLM5-Next's tower: norms on queries and keys, biases by switch, the merger of GLM-4V."""
    h, out, bias = r.size("hidden_size"), r.size("out_hidden_size"), r.flag("attention_bias")
    patch = r.size("in_channels") * _scalar(r, "temporal_patch_size") * square(r, "patch_size")
    block = _block(h, r.size("intermediate_size"), norm_bias=False, attention_bias=bias, gated=True, ffn_bias=bias)
    block += 2 * (h // r.size("num_heads"))
    merger = out * out + 2 * out + 3 * out * r.size("projection_intermediate_size")
    return (linear(patch, h) + _depth(r, "depth") * block + merger + linear(h * square(r, "spatial_merge_size"), out)
            + h)


# -- SigLIP and Gemma ------------------------------------------------------------------------------


def siglip(r: Reader, *, flat_patches: bool = False) -> int:
    """A SigLIP tower: biases everywhere, learned positions, an attention-pooling head unless switched off."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    patch = r.size("num_channels") * square(r, "patch_size")
    positions = (r.size("num_patches") if flat_patches
                 else (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2)
    depth = _depth(r, "num_hidden_layers")
    total = linear(patch, h) + positions * h + depth * _block(h, width) + 2 * h
    if r.flag("vision_use_head", default=True):
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
    return (2 * r.size("position_embedding_size") * h + patch * h + _depth(r, "num_hidden_layers") * block
            + h * text_hidden)


def gemma4_audio(r: Reader, text_hidden: int) -> int:
    """Gemma 4's audio tower: two strided convolutions, Conformer layers, an output projection, a projector."""
    h, kernel = r.size("hidden_size"), r.size("conv_kernel_size")
    channels = r.numbers("subsampling_conv_channels", length=2, low=1) or [128, 32]
    one, two = channels
    # The first projection takes channels of both convolutions (as the class derives it).
    front = 9 * one + one + 9 * one * two + two + one // 4 * two * h
    ffn = 2 * h * 4 * h + 2 * h
    attention = 5 * h * h + h // r.size("num_attention_heads")
    convolution = 2 * h * h + h * h + kernel * h + 2 * h
    out = r.size("output_proj_dims")
    return (front + _depth(r, "num_hidden_layers") * (2 * ffn + attention + convolution + 3 * h)
            + linear(h, out) + out * text_hidden)


def phi4_multimodal(top: Reader, text_hidden: int) -> int:
    """Phi-4-multimodal: SigLIP with two separators, a Conformer, a projector for each way of speech."""
    image = Reader(top.child("vision_config") or {}, "phi4_multimodal_vision", path="vision_config.")
    audio = Reader(top.child("audio_config") or {}, "phi4_multimodal_audio", path="audio_config.")
    h = image.size("hidden_size")
    crop = image.size("crop_size", default=448, high=1 << 16)
    positions = (crop // _scalar(image, "patch_size")) ** 2
    own = (_scalar(image, "image_size", default=crop) // _scalar(image, "patch_size")) ** 2
    tower = siglip(image) + (positions - own) * h
    projector = linear(h, text_hidden) + linear(text_hidden, text_hidden)
    return tower + 2 * h + projector + _phi4_audio(audio, text_hidden)


def _phi4_audio(r: Reader, text_hidden: int) -> int:
    h, width, channels = r.size("hidden_size"), r.size("intermediate_size"), r.size("nemo_conv_channels")
    halvings = r.size("time_reduction", low=2, high=1 << 10).bit_length() - 1
    bands = r.size("input_size")
    for _ in range(halvings):
        bands = (bands - 1) // 2 + 1
    front = 10 * channels + (halvings - 1) * (10 * channels + linear(channels, channels)) + linear(channels * bands, h)
    distance = r.size("bias_max_distance")
    buckets = distance if r.flag("bias_symmetric") else 2 * distance
    ffn = 2 * h + linear(h, 2 * width) + linear(width, h)
    out, separable = r.size("ext_pw_out_channel"), r.size("depthwise_separable_out_channel")
    kernel, multiplier = r.size("kernel_size"), r.size("depthwise_multiplier")
    convolution = (2 * h + 2 * out + linear(h, 2 * out) + h * multiplier * (kernel + 1)
                   + linear(h * multiplier, separable) + linear(h, out))
    block = 2 * ffn + 4 * linear(h, h) + convolution + 4 * h
    speech = 2 * (linear(h, text_hidden) + linear(text_hidden, text_hidden))
    return front + buckets * r.size("num_attention_heads") + _depth(r, "num_blocks") * block + speech


def intern_vit(r: Reader, top: Reader, text_hidden: int) -> int:
    """InternViT with InternVL's own code: layer scales, biases by switch, pixel shuffle, a two-layer projector."""
    h = r.size("hidden_size")
    positions = (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2 + 1
    patch = linear(r.size("num_channels", default=3) * square(r, "patch_size"), h)
    rms = r.text("norm_type", default="rms_norm") == "rms_norm"
    block = _block(h, r.size("intermediate_size"), norm_bias=not rms, attention_bias=r.flag("qkv_bias"),
                   out_bias=True) + 2 * h
    if r.flag("qk_normalization", default=False):
        block += 2 * h
    merged = h * round(1 / max(top.number("downsample_ratio", default=0.5), 1 / 64)) ** 2
    projector = 2 * merged + linear(merged, text_hidden) + linear(text_hidden, text_hidden)
    return patch + h + positions * h + _depth(r, "num_hidden_layers") * block + projector


# -- CLIP and SigLIP with plain projectors ---------------------------------------------------------


def clip(r: Reader) -> int:
    """A CLIP tower: a class token, learned positions, norms before and after."""
    h = r.size("hidden_size")
    positions = (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2 + 1
    patch = r.size("num_channels") * square(r, "patch_size") * h
    return patch + h + positions * h + 4 * h + _depth(r, "num_hidden_layers") * _block(h, r.size("intermediate_size"))


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
    block = _block(h, r.size("intermediate_size"), norm_bias=False, attention_bias=False, gated=True, ffn_bias=False)
    return r.size("num_channels") * square(r, "patch_size") * h + h + _depth(r, "num_hidden_layers") * block


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
    depth = r.size("vt_num_hidden_layers", "num_hidden_layers", default=27, high=MAX_LAYERS)
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
    return linear(patch, h) + grid * h + depth * _block(h, width) + 2 * h + projector


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
    return patch + 2 * h + _depth(r, "num_hidden_layers") * _block(h, r.size("intermediate_size")) + projector


def cohere2(r: Reader, top: Reader, text_hidden: int) -> int:
    """Command A Vision: SigLIP, pixel shuffle, a gated projector."""
    merged = r.size("hidden_size") * top.size("downsample_factor", default=2) ** 2
    width = top.size("alignment_intermediate_size", default=36864)
    return siglip(r) + linear(merged, width) + linear(width // 2, text_hidden)


def exaone4_5(r: Reader, top: Reader, text_hidden: int) -> int:
    """EXAONE 4.5: Qwen2.5-VL's tower with grouped K and V heads."""
    h, heads = r.size("hidden_size"), r.size("num_heads", "num_attention_heads")
    kv = r.size("num_key_value_heads", default=heads)
    fewer = 2 * (heads - kv) * (h // heads)  # rows that K and V lack against full heads
    return qwen2_5_vl(r, top, text_hidden) - _depth(r, "depth") * fewer * (h + 1)


def step3p5(r: Reader, top: Reader, text_hidden: int) -> int:
    """Step-3.5/3.7's tower: layer scales, two strided convolutions, one projection."""
    h = r.size("width", "hidden_size")
    width = int(h * r.number("mlp_ratio", default=4.0))
    depth = r.size("layers", "num_hidden_layers", high=MAX_LAYERS)
    positions = (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2
    patch = r.size("num_channels", default=3) * square(r, "patch_size") * h
    block = _block(h, width) + 2 * h
    downsample = linear(9 * h, 2 * h) + linear(9 * 2 * h, 4 * h)
    return (patch + positions * h + 2 * h + depth * block + downsample
            + linear(4 * h, text_hidden, top.flag("projector_bias", default=False)))


def llama4(r: Reader, top: Reader, text_hidden: int) -> int:
    """Llama 4's tower: a class token, plain blocks with biases, pixel shuffle, a projector without biases."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2 + 1
    patch = r.size("num_channels") * square(r, "patch_size") * h
    inner, out = r.size("projector_input_dim"), r.size("projector_output_dim")
    adapter = width * inner + inner * out
    return (patch + h + positions * h + 4 * h + _depth(r, "num_hidden_layers") * _block(h, width)
            + adapter + r.size("vision_output_dim") * text_hidden)


def mllama(r: Reader, top: Reader, text_hidden: int) -> int:
    """Llama 3.2 Vision's tower: local and gated global layers, tile and aspect-ratio embeddings."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = (_scalar(r, "image_size") // _scalar(r, "patch_size")) ** 2 + 1
    tiles = r.size("max_num_tiles", high=64)
    ratios = len(r.items("supported_aspect_ratios") or [0] * 8) + 1
    block = _block(h, width, attention_bias=False)
    embeddings = (r.size("num_channels") * square(r, "patch_size") * h + h + 1 + positions * h
                  + ratios * tiles * positions * h + 2 * (1 + ratios * tiles * h) + 4 * h)
    layers = _depth(r, "num_hidden_layers", "attention_heads") * block + _depth(r, "num_global_layers") * (block + 2)
    return embeddings + layers + linear(r.size("vision_output_dim"), text_hidden)


def internvl(r: Reader, top: Reader, text_hidden: int) -> int:
    """InternVL (the transformers form): layer scales, biases by switch, pixel shuffle, a two-layer projector."""
    h, width = r.size("hidden_size"), r.size("intermediate_size")
    positions = square(r, "image_size") // square(r, "patch_size") + 1
    patch = linear(r.size("num_channels") * square(r, "patch_size"), h)
    block = _block(h, width, attention_bias=r.flag("attention_bias"), out_bias=True) + 2 * h
    if r.flag("use_qk_norm", default=False):
        block += 2 * h
    norm = 0 if r.flag("use_mean_pooling", default=True) else 2 * h
    table = positions * h if r.flag("use_absolute_position_embeddings", default=True) else 0
    mask = h if r.flag("use_mask_token", default=False) else 0
    merged = h * round(1 / max(top.number("downsample_ratio", default=0.5), 1 / 64)) ** 2
    projector = 2 * merged + linear(merged, text_hidden) + linear(text_hidden, text_hidden)
    return patch + h + table + mask + _depth(r, "num_hidden_layers") * block + norm + projector
