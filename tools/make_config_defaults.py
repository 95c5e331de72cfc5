"""Write src/bstar/codec/hf_config/class_defaults.json: what transformers' configuration classes default to.

python tools/make_config_defaults.py            (in the virtual environment that has transformers; see tools/)

Only fields that shape the architecture, of the model types that bstar describes. The file is a table of
facts about transformers (its version is in the file); bstar never imports transformers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "src/bstar/codec/hf_config/class_defaults.json"
DROPPED = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "use_cache", "pad_token_id", "bos_token_id",
    "eos_token_id", "initializer_range", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act",
    "attention_dropout", "rope_parameters", "pretraining_tp", "router_aux_loss_coef", "output_router_logits",
    "hidden_activation", "routed_scaling_factor", "norm_topk_prob", "rope_interleave", "hidden_dropout",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "activation_function", "image_token_id", "video_token_id", "time_step_limit", "dtype",
    "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32",
    "swiglu_limits", "swiglu_limits_shared", "scale_attn_weights", "logit_scale", "rope_theta",
    "initializer_factor", "init_std", "layerdrop", "dropout", "emb_pdrop", "use_mamba_kernels",
}  # fmt: skip


def wanted() -> set[str]:
    """The model types that the codec's family table names, sub-configs included."""
    sys.path.insert(0, str(ROOT / "src"))
    from bstar.codec.hf_config.families import described_model_types

    return described_model_types()


def fields_of(cls: type) -> dict[str, Any]:
    """JSON-able defaults of a configuration class."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            continue
        if field.name in DROPPED or isinstance(value, dict):
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        found[field.name] = value
    return found


def main() -> None:
    table: dict[str, Any] = {"": {"source": f"transformers {transformers.__version__} configuration classes"}}
    for model_type in sorted(wanted() & set(CONFIG_MAPPING_NAMES)):
        cls = CONFIG_MAPPING[model_type]
        entry = {"defaults": fields_of(cls), "aliases": dict(getattr(cls, "attribute_map", {}) or {})}
        table[model_type] = entry
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            entry["architecture"] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        for sub in (getattr(cls, "sub_configs", {}) or {}).values():
            name = getattr(sub, "model_type", "")
            if name and name not in table and dataclasses.is_dataclass(sub):
                table[name] = {"defaults": fields_of(sub), "aliases": dict(getattr(sub, "attribute_map", {}) or {})}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in table.items())
    OUT.write_text("{\n" + lines + "\n}\n", "utf-8")
    print(f"{len(table) - 1} configuration classes -> {OUT}")


if __name__ == "__main__":
    main()
