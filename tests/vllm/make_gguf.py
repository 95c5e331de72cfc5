"""A small Llama as GGUF with random weights and one token per byte, for llama.cpp's server.

python make_gguf.py FILE        (needs the gguf package)
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

WIDTH, FEED, LAYERS, HEADS, KV_HEADS, CONTEXT = 256, 512, 4, 4, 2, 4096


def _bytes() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def write(file: Path, *, layers: int = LAYERS, width: int = WIDTH, feed: int = FEED, seed: int = 0) -> None:
    """Write the model."""
    writer = gguf.GGUFWriter(file, "llama")
    head = width // HEADS
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    letters = _bytes()
    tokens = [*(letters[b] for b in range(256)), letters[ord("b")] + letters[ord("s")], "<|bos|>", "<|eos|>"]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["b s"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    draw = np.random.default_rng(seed)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name, values.astype(np.float16))

    matrix("token_embd.weight", len(tokens), width)
    matrix("output.weight", len(tokens), width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        name = f"blk.{layer}."
        writer.add_tensor(name + "attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(name + "ffn_norm.weight", np.ones(width, np.float32))
        matrix(name + "attn_q.weight", HEADS * head, width)
        matrix(name + "attn_k.weight", KV_HEADS * head, width)
        matrix(name + "attn_v.weight", KV_HEADS * head, width)
        matrix(name + "attn_output.weight", width, HEADS * head)
        matrix(name + "ffn_gate.weight", feed, width)
        matrix(name + "ffn_up.weight", feed, width)
        matrix(name + "ffn_down.weight", width, feed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
