"""What configs mean: windows, chunks, latents, states, shared caches, spellings, towers, prediction layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bstar.codec.hf_config import known_model_types, model_from_config
from bstar.codec.hf_config.multimodal import WRAPPERS
from bstar.codec.hf_config.reader import STATED, class_defaults
from bstar.errors import ConfigError
from bstar.physics.weights import parameter_counts
from bstar.specs.attention import (
    CacheEntry,
    CompressedAttention,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
    Mamba2,
    ParallelMixers,
)
from bstar.specs.ffn import MoeFfn
from bstar.specs.model import ModelSpec

DATA = Path(__file__).resolve().parent.parent / "data" / "model_configs"
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "vocab_size": 102400,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}  # fmt: skip


def stated(raw: dict[str, Any]) -> dict[str, Any]:
    """A config that states the sizes every file states, here with the class's defaults."""
    defaults = class_defaults(raw["model_type"])
    return {**{k: v for k, v in defaults.items() if k in STATED and isinstance(v, int)}, **raw}


def real(name: str) -> ModelSpec:
    return model_from_config(json.loads((DATA / f"{name}_config.json").read_text()), name=name)


def bytes_per_token(model: ModelSpec, bits: int = 16) -> int:
    """Cache bytes of one more token below every window, at `bits` per element."""
    return sum(g.count * e.heads * e.elements * (e.bits or bits) // 8 // e.tokens_per_entry
               for g in model.layers for e in g.mixer.cache() if e.kind != "state")


def windows(model: ModelSpec) -> dict[int | None, int]:
    """Layers by window."""
    found: dict[int | None, int] = {}
    for group in model.layers:
        if isinstance(group.mixer, GroupedQueryAttention):
            found[group.mixer.window] = found.get(group.mixer.window, 0) + group.count
    return found


def test_kv_bytes_per_token() -> None:
    assert bytes_per_token(model_from_config(LLAMA_3_8B, name="m")) == 131_072
    assert bytes_per_token(model_from_config(V2_LITE, name="m")) == 31_104
    v32 = real("deepseek-ai--DeepSeek-V3.2")
    entries = v32.layers[0].mixer.cache()
    assert [(e.kind, e.packed_fp8_bytes, e.elements) for e in entries] == [("latent", 656, 576), ("index", None, 132)]


def test_old_and_new_spellings_describe_the_same_model() -> None:
    new = {k: v for k, v in LLAMA_3_8B.items() if k not in ("torch_dtype", "rope_theta")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert model_from_config(new, name="m") == model_from_config(LLAMA_3_8B, name="m")
    mixtral = {**LLAMA_3_8B, "model_type": "mixtral", "num_experts_per_tok": 2}
    assert (model_from_config({**mixtral, "num_local_experts": 8}, name="m")
            == model_from_config({**mixtral, "num_experts": 8}, name="m"))


def test_class_defaults_fill_what_a_config_omits() -> None:
    text = {"hidden_size": 2560, "num_hidden_layers": 12, "model_type": "gemma3_text"}
    gemma = model_from_config({"model_type": "gemma3", "text_config": text}, name="m")
    assert any("num_attention_heads" in note for note in gemma.notes)
    mixer = gemma.layers[0].mixer
    assert isinstance(mixer, GroupedQueryAttention)
    assert (mixer.head_dim, mixer.num_heads, mixer.num_kv_heads, gemma.tied) == (256, 8, 4, True)
    llama = model_from_config({k: v for k, v in LLAMA_3_8B.items() if k != "num_key_value_heads"}, name="m")
    assert isinstance(llama.layers[0].mixer, GroupedQueryAttention)
    assert llama.layers[0].mixer.num_kv_heads == 32 and not llama.tied


def test_windows_and_chunks() -> None:
    assert windows(real("openai--gpt-oss-120b")) == {128: 18, None: 18}
    assert windows(real("nvidia--Gemma-4-26B-A4B-NVFP4")) == {1024: 25, None: 5}
    scout = real("meta-llama--Llama-4-Maverick-17B-128E-Instruct")
    assert windows(scout) == {8192: 36, None: 12}
    assert all(g.mixer.chunked == (g.mixer.window is not None) for g in scout.layers
               if isinstance(g.mixer, GroupedQueryAttention))
    assert {g.ffn.kind for g in scout.layers} == {"moe", "dense"}
    assert windows(real("Qwen--Qwen3-8B")) == {None: 36}  # sliding_window without use_sliding_window
    gemma3 = stated({"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024})
    assert windows(model_from_config(gemma3, name="m")) == {1024: 52, None: 10}


def test_mimo_gives_its_sliding_layers_their_own_heads() -> None:
    model = real("XiaomiMiMo--MiMo-V2-Flash")
    mixers = [g.mixer for g in model.layers for _ in g.indices if isinstance(g.mixer, GroupedQueryAttention)]
    found = [(m.window, m.num_kv_heads, m.head_dim, m.v_head_dim, m.sinks) for m in mixers]
    assert found.count((128, 8, 192, 128, True)) == 39
    assert found.count((None, 4, 192, 128, False)) == 9


def test_gated_delta_state() -> None:
    model = real("nvidia--Qwen3.5-397B-A17B-NVFP4")
    group = next(g for g in model.layers if isinstance(g.mixer, GatedDeltaNet))
    conv, state = group.mixer.cache()
    assert (conv.elements, conv.bits) == (3 * (2 * 16 * 128 + 64 * 128), 16)
    assert (state.elements, state.bits) == (64 * 128 * 128, 32)
    assert group.count == 45


def test_mamba_states_of_nemotron() -> None:
    model = real("nvidia--Nemotron-H-56B-Base-8K")
    group = next(g for g in model.layers if isinstance(g.mixer, Mamba2))
    entries = group.mixer.cache()
    assert {e.kind for e in entries} == {"state"}
    assert sum(e.elements for e in entries[:2]) == 3 * (256 * 64 + 2 * 8 * 256)
    assert entries[2] == CacheEntry(kind="state", heads=256, elements=256 * 64 * 256, bits=32, fp8_capable=False)
    kinds = {(g.mixer.kind, g.ffn.kind): g.count for g in model.layers}
    assert kinds == {("mamba2", "none"): 54, ("none", "dense"): 54, ("gqa", "none"): 10}


def test_deepseek_v4_caches() -> None:
    model = real("nvidia--DeepSeek-V4-Flash-NVFP4")
    ratios = {g.mixer.compress_ratio: g.count for g in model.layers if isinstance(g.mixer, CompressedAttention)}
    assert ratios == {0: 2, 4: 21, 128: 20}
    four = next(g.mixer for g in model.layers if isinstance(g.mixer, CompressedAttention) and g.mixer.indexer)
    kinds = [(e.kind, e.elements, e.window, e.tokens_per_entry, e.bits) for e in four.cache()]
    assert kinds == [("latent", 512, 128, 1, None), ("latent", 512, None, 4, None), ("latent", 2048, 8, 1, 32),
                     ("index", 132, None, 4, 8), ("latent", 512, 8, 1, 32)]
    assert four.cache()[0].packed_fp8_bytes == 584
    assert model.kv_cache_dtype == "fp8"


def test_shared_caches_and_wide_global_heads() -> None:
    gemma = model_from_config(stated({"model_type": "gemma3n_text"}), name="m")
    sharing = sum(g.count for g in gemma.layers if isinstance(g.mixer, GroupedQueryAttention) and g.mixer.shares_kv)
    assert (gemma.num_layers, sharing) == (35, 15)
    four = real("nvidia--Gemma-4-26B-A4B-NVFP4")
    full = next(g.mixer for g in four.layers if isinstance(g.mixer, GroupedQueryAttention) and g.mixer.window is None)
    assert (full.head_dim, full.num_kv_heads, full.k_eq_v) == (512, 2, True)
    assert full.cache()[0].elements == 1024


def test_sparse_layers_that_share_an_indexer() -> None:
    model = real("nvidia--GLM-5.2-NVFP4")
    shared = sum(g.count for g in model.layers
                 if isinstance(g.mixer, LatentAttention) and g.mixer.indexer and g.mixer.indexer.shared)
    assert 0 < shared < 78
    assert all(len(g.mixer.cache()) == (1 if g.mixer.indexer.shared else 2) for g in model.layers
               if isinstance(g.mixer, LatentAttention) and g.mixer.indexer)


def test_attention_and_mamba_side_by_side() -> None:
    model = model_from_config(stated({"model_type": "falcon_h1", "num_hidden_layers": 2}), name="m")
    mixer = model.layers[0].mixer
    assert isinstance(mixer, ParallelMixers)
    assert {e.kind for e in mixer.cache()} == {"kv", "state"}


def test_cross_attention_keeps_nothing_of_text() -> None:
    model = model_from_config({"model_type": "mllama", "text_config": {"num_hidden_layers": 40}}, name="m")
    cross = next(g for g in model.layers if g.mixer.kind == "cross")
    assert cross.indices == (3, 8, 13, 18, 23, 28, 33, 38)
    assert all(e.needs_encoder for e in cross.mixer.cache())
    assert [b.in_total for b in model.blocks] == [False]


@pytest.mark.parametrize(("rope", "context", "engine"), [
    ({"type": "linear", "factor": 4.0}, 32768, None),
    ({"rope_type": "dynamic", "factor": 2.0}, 16384, None),
    ({"rope_type": "yarn", "factor": 4.0}, 8192, None),
    ({"rope_type": "llama3", "factor": 8.0}, 8192, None),
    ({"type": "longrope", "short_factor": [1.0]}, 8192, 2048),
])
def test_context_follows_the_engine(rope: dict[str, Any], context: int, engine: int | None) -> None:
    raw = {**LLAMA_3_8B, "rope_scaling": rope, "original_max_position_embeddings": 2048}
    model = model_from_config(raw, name="m")
    assert (model.max_context_tokens, model.engine_context_tokens) == (context, engine)


def test_head_that_transformers_ties_and_engines_do_not() -> None:
    """Mistral Small 3.2: its config is silent, the class ties, the checkpoint (and vLLM) hold both tables."""
    text = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}
    model = model_from_config({"model_type": "mistral3", "text_config": text}, name="m")
    assert (model.tied, model.head_in_total) == (False, False)
    assert any("parameters.total" in note for note in model.notes)


def test_prediction_layers_are_beside_the_model() -> None:
    r1 = real("deepseek-ai--DeepSeek-R1")
    block = next(b for b in r1.blocks if b.role == "mtp")
    h, vocab = 7168, 129280
    # The checkpoint holds 684.53 B parameters, with a copy of embedding and head in the prediction layer.
    assert block.parameters + 2 * vocab * h + 671_026_404_352 == pytest.approx(684.53e9, rel=1e-4)
    assert (block.in_total, block.loaded, block.streamed) == (False, False, False)


def test_every_known_type_answers_or_refuses() -> None:
    types = known_model_types()
    assert len(types) > 110
    described = 0
    for model_type in types:
        try:
            raw = {"text_config": {"num_hidden_layers": 4}} if model_type in WRAPPERS else {}
            model = model_from_config(stated({"model_type": model_type, **raw}), name=model_type)
        except ConfigError as error:
            assert str(error).startswith("config.json: ")
            continue
        described += 1
        for group in model.layers:
            for tensor in group.tensors(model.hidden_size):
                assert tensor.rows > 0 and tensor.columns > 0 and tensor.copies > 0, (model_type, tensor.name)
            names = [t.name for t in group.tensors(model.hidden_size)]
            assert len(names) == len(set(names)), model_type
            if isinstance(group.ffn, MoeFfn):
                assert group.ffn.top_k <= group.ffn.num_experts
    assert described > 80


STATES = json.loads((DATA.parent / "vllm_state_shapes.json").read_text())["models"]


@pytest.mark.parametrize("model_type", sorted(STATES))
def test_states_are_those_that_vllm_allocates(model_type: str) -> None:
    model = model_from_config(stated(STATES[model_type]["config"]), name="m")
    entries = next(found for g in model.layers if (found := [e for e in g.mixer.cache() if e.kind == "state"]))
    for tensor_parallel, expected in STATES[model_type]["states"].items():
        by_bits: dict[int | None, int] = {}
        for entry in entries:
            share = entry.elements // min(int(tensor_parallel), entry.heads)
            by_bits[entry.bits] = by_bits.get(entry.bits, 0) + share
        wanted: dict[int | None, int] = {}
        for elements, bits in expected:
            wanted[bits] = wanted.get(bits, 0) + elements
        assert by_bits == wanted, (model_type, tensor_parallel)


def test_the_documentation_names_every_known_type() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text("utf-8")
    listed = set(re.findall(r"`([\w-]+)`", page.split("## Model types")[1]))
    assert listed == set(known_model_types())


GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 2560,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 8192,
    "shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 100352,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False,
}  # fmt: skip


def test_keys_of_a_mechanism_that_no_layer_uses_are_no_error() -> None:
    """Granite 4.0 Micro: the hybrid class with attention alone, 3,402,836,480 parameters."""
    model = model_from_config(GRANITE | {"layer_types": ["attention"] * 40}, name="x")
    assert parameter_counts(model).total == 3_402_836_480
    assert not any(e.kind == "state" for g in model.layers for e in g.mixer.cache())
    hybrid = model_from_config(GRANITE | {"layer_types": ["mamba"] * 36 + ["attention"] * 4}, name="x")
    assert any(e.kind == "state" for g in hybrid.layers for e in g.mixer.cache())


def test_a_deepseek_of_dense_layers_keeps_its_expert_keys() -> None:
    config = json.loads((DATA / "deepseek-ai--DeepSeek-R1_config.json").read_text())
    assert not model_from_config(config | {"first_k_dense_replace": 61}, name="x").is_moe


LONGCAT = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "attention_bias": False,
    "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 28,
    "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12,
    "router_bias": False, "vocab_size": 131072, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_longcat_blocks_are_two_layers_with_experts_beside_the_first() -> None:
    """560.7 B parameters, 27 B of them active on average (the publisher's figures: 560 B, about 27 B)."""
    model = model_from_config(LONGCAT, name="x")
    counts = parameter_counts(model)
    assert counts.total == 560_664_958_976 and counts.active / 1e9 == pytest.approx(27.95, abs=0.01)
    assert model.num_layers == 56 and sum(g.count for g in model.layers if g.ffn.kind == "moe") == 28
    assert sum(e.elements for g in model.layers for e in g.mixer.cache()) * 28 == 56 * 576
    # transformers' class builds this many (it reserves memory for zero experts too, so they are left out here).
    plain = model_from_config(LONGCAT | {"router_bias": True, "attention_bias": True, "zero_expert_num": 0}, name="x")
    assert parameter_counts(plain).total == 560_621_395_456
    assert next(g.ffn for g in plain.layers if isinstance(g.ffn, MoeFfn)).top_k == 12


HY_V4 = {
    "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "vocab_size": 120832, "hidden_size": 2816,
    "intermediate_size": 6912, "moe_intermediate_size": 768, "num_hidden_layers": 34, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 262144, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
    "hc_mult": 4, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("changes", "total"), [  # transformers 5.19's class on the meta device
    ({}, 58_278_193_133), ({"tie_word_embeddings": True, "attention_bias": True, "hc_mult": 2}, 57_933_467_995),
    ({"indexer_types": ["full"] * 34, "mlp_layer_types": ["sparse"] * 34}, 59_973_189_613),
])
def test_hy_v4_counts(changes: dict[str, Any], total: int) -> None:
    model = model_from_config(HY_V4 | changes, name="x")
    assert parameter_counts(model).total == total
    entries = [e for g in model.layers for e in g.mixer.cache() for _ in g.indices]
    assert sum(e.kind == "latent" for e in entries) == 34
    assert sum(e.kind == "index" for e in entries) == (34 if "indexer_types" in changes else 10)


SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384,
          "patch_size": 14, "num_hidden_layers": 4, "num_attention_heads": 16, "vision_use_head": False}
IDEFICS = {"hidden_size": 768, "intermediate_size": 3072, "image_size": 512, "patch_size": 16, "num_hidden_layers": 5,
           "num_attention_heads": 12}
SMALL_LLAMA = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 3, "num_attention_heads": 9,
               "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49280,
               "max_position_embeddings": 8192, "tie_word_embeddings": False}
SMALL_QWEN = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 3, "num_attention_heads": 14,
              "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 152000,
              "max_position_embeddings": 32768}
SMALL_COHERE = {"model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 256000, "head_dim": 128,
                "max_position_embeddings": 8192, "sliding_window": 4096,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


@pytest.mark.parametrize(("config", "total"), [  # transformers 5.19's classes on the meta device
    ({"model_type": "llava_onevision", "text_config": SMALL_QWEN | {"tie_word_embeddings": True},
      "vision_config": SIGLIP, "tie_word_embeddings": True}, 245_246_400),
    ({"model_type": "llava_onevision", "text_config": SMALL_QWEN | {"tie_word_embeddings": False},
      "vision_config": SIGLIP | {"vision_use_head": True}, "tie_word_embeddings": False}, 396_676_752),
    ({"model_type": "aya_vision", "text_config": SMALL_COHERE, "vision_config": SIGLIP, "downsample_factor": 2,
      "alignment_intermediate_size": 28672}, 2_174_373_184),
    ({"model_type": "idefics3", "text_config": SMALL_LLAMA, "vision_config": IDEFICS, "scale_factor": 2}, 105_978_816),
    ({"model_type": "smolvlm", "text_config": SMALL_LLAMA, "vision_config": IDEFICS, "scale_factor": 4}, 111_287_232),
])
def test_towers_of_siglip_kind(config: dict[str, Any], total: int) -> None:
    model = model_from_config(config | {"torch_dtype": "bfloat16"}, name="x")
    assert parameter_counts(model).total == total and model.multimodal
