"""GGUF metadata of hybrids: which layers hold a state, and its sizes, as the Hub's config keys."""

from __future__ import annotations

from typing import Any

from bstar.codec.gguf_keys import Keys


def delta_net(config: dict[str, Any], reader: Keys) -> None:
    """Gated delta nets of Qwen3-Next and Qwen3.5, with attention every few layers."""
    if not config["model_type"].startswith(("qwen3_next", "qwen3_5")):
        return
    heads = reader.number("ssm.time_step_rank", required=True) or 1
    config.update(
        linear_conv_kernel_dim=reader.number("ssm.conv_kernel", required=True),
        linear_num_key_heads=reader.number("ssm.group_count", required=True),
        linear_num_value_heads=heads,
        linear_key_head_dim=reader.number("ssm.state_size", required=True),
        linear_value_head_dim=(reader.number("ssm.inner_size", required=True) or 0) // heads,
    )
    interval = reader.number("full_attention_interval") or config["full_attention_interval"]
    config["full_attention_interval"] = interval
    config["layer_types"] = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(config["num_hidden_layers"])
    ]


def mamba_stack(config: dict[str, Any], reader: Keys) -> None:
    """Mamba 2 layers of Nemotron-H and Granite 4; the tensors of a layer say what it is."""
    if config["model_type"] not in ("nemotron_h", "granitemoehybrid"):
        return
    heads = reader.number("ssm.time_step_rank") or 0
    inner, state = reader.number("ssm.inner_size") or 0, reader.number("ssm.state_size")
    groups, kernel = reader.number("ssm.group_count"), reader.number("ssm.conv_kernel")
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "nemotron_h":
        config["hybrid_override_pattern"] = "".join(_letter(reader, i) for i in layers)
        config["use_conv_bias"] = any(n.endswith("ssm_conv1d.bias") for n in reader.tensors)
        sizes = {"mamba_num_heads": heads, "mamba_head_dim": inner // max(heads, 1), "ssm_state_size": state,
                 "n_groups": groups, "conv_kernel": kernel}  # fmt: skip
        latent = next((t for n, t in reader.tensors.items() if n.endswith(".ffn_latent_down.weight")), None)
        if latent is not None:
            sizes["moe_latent_size"] = latent.shape[1]
    else:
        config["layer_types"] = ["mamba" if f"blk.{i}.ssm_in.weight" in reader.tensors else "attention" for i in layers]
        config["mamba_conv_bias"] = any(n.endswith("ssm_conv1d.bias") for n in reader.tensors)
        sizes = {"mamba_n_heads": heads, "mamba_d_head": inner // max(heads, 1), "mamba_d_state": state,
                 "mamba_n_groups": groups, "mamba_d_conv": kernel,
                 "mamba_expand": inner // config["hidden_size"] if config["hidden_size"] else None}  # fmt: skip
        if "num_local_experts" not in config:
            config.update(num_local_experts=0, shared_intermediate_size=config.get("intermediate_size"))
    config.update({k: v for k, v in sizes.items() if v})


def _letter(reader: Keys, layer: int) -> str:
    """Nemotron's letter of a layer: Mamba, attention, experts or a dense FFN."""
    for tensor, letter in (("ssm_in", "M"), ("attn_q", "*"), ("ffn_up_exps", "E")):
        if f"blk.{layer}.{tensor}.weight" in reader.tensors:
            return letter
    return "-"
