"""Parameter counts of audio towers with their projectors, exactly as transformers 5.19 builds them."""

from __future__ import annotations

from bstar.codec.hf_config.reader import Reader
from bstar.codec.hf_config.towers import layer_count, linear, transformer_block


def qwen2_5_audio(r: Reader, text_hidden: int) -> int:
    """Qwen2.5-Omni's audio tower: two convolutions, Whisper's layers (no bias on K), one projection."""
    h, out = r.size("d_model"), r.size("output_dim")
    block = transformer_block(h, r.size("encoder_ffn_dim")) - h
    front = linear(3 * r.size("num_mel_bins"), h) + linear(3 * h, h) + 2 * out
    return front + layer_count(r, "encoder_layers") * block + 2 * h + linear(h, out)


def qwen3_audio(r: Reader, text_hidden: int) -> int:
    """Qwen3-Omni's audio tower: three strided convolutions, Whisper's layers, two projections."""
    h, out, c = r.size("d_model"), r.size("output_dim"), r.size("downsample_hidden_size")
    bands = r.size("num_mel_bins")
    for _ in range(3):
        bands = (bands + 1) // 2
    front = 10 * c + 2 * linear(9 * c, c) + c * bands * h
    block = transformer_block(h, r.size("encoder_ffn_dim"))
    return front + layer_count(r, "encoder_layers") * block + 2 * h + linear(h, h) + linear(h, out)


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
    return (front + layer_count(r, "num_hidden_layers") * (2 * ffn + attention + convolution + 3 * h)
            + linear(h, out) + out * text_hidden)


def phi4_audio(r: Reader, text_hidden: int) -> int:
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
    return front + buckets * r.size("num_attention_heads") + layer_count(r, "num_blocks") * block + speech
