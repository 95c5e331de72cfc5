"""A small Llama-shaped model folder, config and byte-level tokenizer, no weights (run inside the vLLM environment).

VENV/bin/python make_tiny_model.py FOLDER [KEY=VALUE …]      config keys that differ from the default's
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
}  # fmt: skip


def write(folder: Path, changes: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["bytes and batches, batches of bytes"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|eos|>",
                "model_max_length": 4096,
                "chat_template": "{% for m in messages %}{{m['content']}}{% endfor %}",
            }
        )
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


if __name__ == "__main__":
    write(Path(sys.argv[1]), {key: json.loads(value) for key, _, value in (a.partition("=") for a in sys.argv[2:])})
