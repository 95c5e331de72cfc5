"""Configs that wrap a text config: where it is, which tower stands beside it, and what counts as a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bstar.codec.hf_config import audio, vision
from bstar.codec.hf_config.reader import Reader
from bstar.codec.hf_config.towers import Tower

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """How a multimodal model type is put together.

    text_type    model type of the text config where it names none
    vision_type  class of the vision config (its defaults); "" where there is no tower
    tower        parameters of tower and projector together
    audio_type, audio   class of the audio config and its parameters, where an audio tower stands beside
    audio_optional      no audio_config means no audio tower
    counted      whether transformers' AutoModelForCausalLM / ImageTextToText builds the tower: then
                 `parameters.total` has it. False: the causal model is the text model alone
    optional     no vision_config means no tower (otherwise: the class's default tower)
    tower_defaults  sizes of the tower that a missing vision_config stands for, where they are the wrapper's own
    """

    text_type: str
    vision_type: str = ""
    tower: Tower | None = None
    audio_type: str = ""
    audio: Callable[[Reader, int], int] | None = None
    audio_optional: bool = True
    counted: bool = True
    optional: bool = False
    tower_defaults: tuple[tuple[str, int], ...] = ()


# Model types whose towers stand in the text model itself: (the config, hidden size) -> parameters.
EMBEDDED_TOWERS: dict[str, Callable[[Reader, int], int]] = {"phi4_multimodal": vision.phi4_multimodal}

# Speech models of which engines serve the thinker: model type -> the thinker's.
THINKERS: dict[str, str] = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}

_CLIP_336 = (("intermediate_size", 4096), ("hidden_size", 1024), ("patch_size", 14), ("image_size", 336),
             ("num_hidden_layers", 24), ("num_attention_heads", 16))

WRAPPERS: dict[str, Wrapper] = {
    "llama4": Wrapper(text_type="llama4_text", vision_type="llama4_vision_model", tower=vision.llama4, counted=False),
    "mllama": Wrapper(text_type="mllama_text_model", vision_type="mllama_vision_model", tower=vision.mllama,
                      counted=False),
    "mistral3": Wrapper(text_type="mistral", vision_type="pixtral", tower=vision.mistral3,
                        tower_defaults=(("patch_size", 14),)),
    "gemma3": Wrapper(text_type="gemma3_text", vision_type="siglip_vision_model", tower=vision.gemma3),
    "gemma4": Wrapper(text_type="gemma4_text", vision_type="gemma4_vision", tower=vision.gemma4, optional=True,
                      audio_type="gemma4_audio", audio=audio.gemma4_audio),
    "qwen2_vl": Wrapper(text_type="qwen2_vl_text", vision_type="qwen2_vl_vision", tower=vision.qwen2_vl),
    "qwen2_5_vl": Wrapper(text_type="qwen2_5_vl_text", vision_type="qwen2_5_vl_vision", tower=vision.qwen2_5_vl),
    "qwen3_vl": Wrapper(text_type="qwen3_vl_text", vision_type="qwen3_vl_vision", tower=vision.qwen3_vl),
    "qwen3_vl_moe": Wrapper(text_type="qwen3_vl_moe_text", vision_type="qwen3_vl_moe_vision", tower=vision.qwen3_vl),
    "qwen3_5": Wrapper(text_type="qwen3_5_text", vision_type="qwen3_5_vision", tower=vision.qwen3_vl, counted=False),
    "qwen3_5_moe": Wrapper(text_type="qwen3_5_moe_text", vision_type="qwen3_5_moe_vision", tower=vision.qwen3_vl,
                           counted=False),
    "glm4v": Wrapper(text_type="glm4v_text", vision_type="glm4v_vision", tower=vision.glm4v),
    "glm46v": Wrapper(text_type="glm4v_text", vision_type="glm4v_vision", tower=vision.glm4v),
    "glm4v_moe": Wrapper(text_type="glm4v_moe_text", vision_type="glm4v_moe_vision", tower=vision.glm4v),
    "glm5_next": Wrapper(text_type="glm5_next_text", vision_type="glm5_next_vision", tower=vision.glm5_next),
    "kimi_k25": Wrapper(text_type="deepseek_v3", vision_type="kimi_k25_vision", tower=vision.moonvit),
    "kimi_k3": Wrapper(text_type="kimi_linear", vision_type="kimi_k25_vision", tower=vision.moonvit),
    "kimi_vl": Wrapper(text_type="deepseek_v3", vision_type="moonvit", tower=vision.moonvit),
    "step3p7": Wrapper(text_type="step3p5", vision_type="step3p5_vision", tower=vision.step3p5),
    "minimax_m3_vl": Wrapper(text_type="minimax_m3_vl_text", vision_type="minimax_m3_vl_vision",
                             tower=vision.minimax_m3),
    "cohere2_vision": Wrapper(text_type="cohere2", vision_type="siglip_vision_model", tower=vision.cohere2,
                              tower_defaults=(("hidden_size", 1152), ("intermediate_size", 3072), ("image_size", 512),
                                              ("num_hidden_layers", 27), ("num_attention_heads", 12))),
    "exaone4_5": Wrapper(text_type="exaone4", vision_type="exaone4_5_vision", tower=vision.exaone4_5),
    "step3_vl": Wrapper(text_type="step3_text", vision_type="step3_vision_encoder", tower=vision.step3),
    "llava": Wrapper(text_type="llama", vision_type="clip_vision_model", tower=vision.llava,
                     tower_defaults=_CLIP_336),
    "llava_next": Wrapper(text_type="llama", vision_type="clip_vision_model", tower=vision.llava_next,
                          tower_defaults=_CLIP_336),
    "llava_onevision": Wrapper(text_type="qwen2", vision_type="siglip_vision_model", tower=vision.llava_next),
    "aya_vision": Wrapper(text_type="cohere2", vision_type="siglip_vision_model", tower=vision.aya),
    "idefics3": Wrapper(text_type="llama", vision_type="idefics3_vision", tower=vision.idefics3),
    "smolvlm": Wrapper(text_type="llama", vision_type="smolvlm_vision", tower=vision.idefics3),
    "lfm2_vl": Wrapper(text_type="lfm2", vision_type="siglip2_vision_model", tower=vision.lfm2_vl),
    "qwen2_5_omni_thinker": Wrapper(
        text_type="qwen2_5_omni_text", vision_type="qwen2_5_omni_vision_encoder", tower=vision.qwen2_5_vl,
        audio_type="qwen2_5_omni_audio_encoder", audio=audio.qwen2_5_audio, audio_optional=False),
    "qwen3_omni_moe_thinker": Wrapper(
        text_type="qwen3_omni_moe_text", vision_type="qwen3_omni_moe_vision_encoder", tower=vision.qwen3_vl,
        audio_type="qwen3_omni_moe_audio_encoder", audio=audio.qwen3_audio, audio_optional=False),
    "internvl_chat": Wrapper(text_type="qwen2", vision_type="intern_vit_6b", tower=vision.intern_vit),
    "gemma3n": Wrapper(text_type="gemma3n_text"),
    "internvl": Wrapper(text_type="qwen2", vision_type="internvl_vision", tower=vision.internvl),
}
