"""Engine command lines: what people paste is read as the engines read it, and nothing is dropped."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bstar.codec.build import build_deployment
from bstar.codec.engine_command import format_command, parse_command
from bstar.codec.engine_flags import grammar
from bstar.codec.engine_values import engine_int, max_model_len
from bstar.errors import BstarError, ConfigError, SpecError
from bstar.specs.attention import GroupedQueryAttention
from bstar.specs.deployment import Deployment
from bstar.specs.ffn import DenseFfn, MoeFfn
from bstar.specs.model import LayerGroup, ModelSpec
from bstar.specs.tensors import WeightTensor


def _model(*, moe: bool = False) -> ModelSpec:
    ffn = MoeFfn(num_experts=64, top_k=4, width=512) if moe else DenseFfn(width=4096)
    attention = GroupedQueryAttention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    table = WeightTensor(name="embed_tokens", role="embedding", rows=32000, columns=4096, shard="vocab", matmul=False)
    head = WeightTensor(name="lm_head", role="lm_head", rows=32000, columns=4096, shard="vocab")
    return ModelSpec(
        name="org/test-model-of-no-catalog", architecture="X", hidden_size=4096, vocab_size=32000,
        max_context_tokens=131072, layers=(LayerGroup(indices=tuple(range(8)), mixer=attention, ffn=ffn),),
        embedding=(table,), lm_head=(head,))


def test_a_plain_vllm_line() -> None:
    parsed = parse_command("vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs=64 --max_model_len 8k --port 8000")
    assert (parsed.engine, parsed.model) == ("vllm", "meta-llama/Llama-3.1-8B")
    assert dict(parsed.settings) == {"tp": 2, "max_num_seqs": 64, "max_model_len": 8000}
    assert parsed.unmodelled == ("--port 8000",)
    assert parsed.unknown == ()


@pytest.mark.parametrize(("text", "model", "engine"), [
    ("python -m vllm.entrypoints.openai.api_server --model a/b --tensor-parallel-size 2", "a/b", "vllm"),
    ("python3 /x/site-packages/vllm/entrypoints/openai/api_server.py --model a/b -tp=2", "a/b", "vllm"),
    ("$ CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve a/b \\\n  -tp 2 \\\n --port 1 > log 2>&1 &", "a/b", "vllm"),
    ("docker run --gpus all -p 8000:8000 --ipc=host -e HF_TOKEN=x vllm/vllm-openai:v0.11.0 --model a/b -tp 2",
     "a/b", "vllm"),
    ("docker run --name vllm --rm -it vllm/vllm-openai:latest a/b --tensor-parallel-size 2", "a/b", "vllm"),
    ("cd /srv && source .venv/bin/activate && vllm serve a/b -tp 2 && echo done", "a/b", "vllm"),
    ("bash -c \"ulimit -n 65536; vllm serve a/b --tensor_parallel_size 2\"", "a/b", "vllm"),
    ("/opt/venv/bin/vllm serve --model a/b --tensor-parallel-size 2  # a remark", "a/b", "vllm"),
    ("vllm serve --tensor-parallel-size 2 a/b", "a/b", "vllm"),
    ("vllm serve a/b --tensor-par 2", "a/b", "vllm"),
    ("# don't forget\nvllm serve a/b -tp 2 # don't\n", "a/b", "vllm"),
    ("vllm serve a/b --api-key x#y -tp 2\nsleep 5", "a/b", "vllm"),
    ("python -m sglang.launch_server --model-path a/b --tp 2 --trust-remote-code", "a/b", "sglang"),
    ("sglang serve --model-path a/b --tp-size 2", "a/b", "sglang"),
    ("docker run lmsysorg/sglang:v0.5.3-cu126 python3 -m sglang.launch_server --model a/b --tp 2", "a/b", "sglang"),
    ("trtllm-serve a/b --tp_size 2", "a/b", "trtllm"),
    ("mpirun -n 2 trtllm-llmapi-launch trtllm-serve serve a/b --tp-size 2", "a/b", "trtllm"),
])  # fmt: skip
def test_launchers(text: str, model: str, engine: str) -> None:
    parsed = parse_command(text)
    assert (parsed.engine, parsed.model, parsed.settings["tp"]) == (engine, model, 2)


def test_versions_come_from_image_tags() -> None:
    assert parse_command("docker run vllm/vllm-openai:v0.19.0 --model a/b").engine_at_version == "vllm@0.19.0"
    assert parse_command("docker run vllm/vllm-openai:latest --model a/b").version is None
    text = "docker run lmsysorg/sglang:v0.5.3-cu126 sglang serve --model-path a/b"
    assert parse_command(text).engine_at_version == "sglang@0.5.3"


def test_json_values_and_dotted_keys() -> None:
    text = """vllm serve a/b --speculative-config '{"method": "eagle3", "num_speculative_tokens": 3}' \
      --compilation-config '{"cudagraph_capture_sizes": [1, 2, 64]}' -O3"""
    parsed = parse_command(text)
    assert dict(parsed.settings) == {
        "num_speculative_tokens": 3, "speculative_method": "eagle3", "cudagraph_max_size": 64}
    assert any("eagle3" in flag for flag in parsed.unmodelled)
    assert "-O3" in parsed.unmodelled
    dotted = parse_command("vllm serve a/b --compilation-config.cudagraph_mode NONE")
    assert dotted.settings["cudagraph_max_size"] == 0
    assert parse_command("vllm serve a/b -O0").settings["cudagraph_max_size"] == 0
    sizes = parse_command("vllm serve a/b --cudagraph-capture-sizes 1 2 4 8 --port 1")
    assert sizes.settings["cudagraph_max_size"] == 8


def test_booleans_and_negations() -> None:
    parsed = parse_command("vllm serve a/b --no-enable-prefix-caching --enable-chunked-prefill --enforce-eager")
    assert dict(parsed.settings) == {
        "enable_prefix_caching": False, "enable_chunked_prefill": True, "enforce_eager": True}
    assert parse_command("vllm serve a/b --no-async-scheduling").settings["async_scheduling"] is False


def test_unknown_flags_are_reported_and_unmodelled_ones_listed() -> None:
    parsed = parse_command(
        "vllm serve a/b --no-such-flag 3 --served-model-name x y --swap-space 4 --tool-call-parser z")
    assert parsed.unknown == ("--no-such-flag 3",)
    assert parsed.unmodelled == ("--served-model-name x y", "--swap-space 4", "--tool-call-parser z")


def test_a_list_flag_does_not_swallow_the_model() -> None:
    parsed = parse_command("vllm serve --served-model-name x y --max-model-len -1 --model a/b")
    assert parsed.model == "a/b"
    assert parsed.settings["max_model_len"] == -1


@pytest.mark.parametrize("text", [
    "", "ls -l", "vllm bench serve", "echo hello", "vllm serve a/b --max-num-seqs", "vllm serve 'a/b",
    "vllm serve a/b --speculative-config notjson", "vllm serve a/b --config missing.yaml",
    "vllm serve a/b --max-num-seqs many", "vllm serve a/b --gpu-memory-utilization lots",
    "vllm serve a/b --max-num-batched-tokens 1.5K", "vllm serve a/b --dtype float7",
    "python -m sglang.launch_server --model-path a/b --tp 4 --dp 3 --enable-dp-attention",
])  # fmt: skip
def test_bad_commands_are_one_line_errors(text: str) -> None:
    with pytest.raises(BstarError) as caught:
        parse_command(text)
    assert "\n" not in str(caught.value)


def test_config_file_comes_before_the_flags(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: a/b\nmax-num-seqs: 8\nenforce-eager: true\nserved-model-name: [x, y]\n"
                    "speculative-config:\n  num_speculative_tokens: 2\n")
    parsed = parse_command(f"vllm serve --config {path} --max-num-seqs 16")
    assert parsed.model == "a/b"
    assert dict(parsed.settings) == {"max_num_seqs": 16, "enforce_eager": True, "num_speculative_tokens": 2}


def test_sglang_dp_attention_divides_tp() -> None:
    parsed = parse_command("python -m sglang.launch_server --model-path a/b --tp 8 --dp 4 --enable-dp-attention "
                           "--mem-fraction-static 0.85 --max-running-requests 512 --disable-radix-cache")
    assert dict(parsed.settings) == {
        "tp": 2, "attention_dp": 4, "gpu_memory_utilization": 0.85, "max_num_seqs": 512,
        "enable_prefix_caching": False}


def test_trtllm_options_file(tmp_path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("enable_attention_dp: true\nkv_cache_config:\n  dtype: fp8\n  free_gpu_memory_fraction: 0.8\n"
                    "  enable_block_reuse: false\ncuda_graph_config:\n  max_batch_size: 256\nprint_iter_log: true\n")
    parsed = parse_command(f"trtllm-serve a/b --tp_size 4 --extra_llm_api_options {path}")
    assert dict(parsed.settings) == {
        "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.8, "enable_prefix_caching": False,
        "cudagraph_max_size": 256, "attention_dp": 4, "tp": 1}
    assert parsed.unmodelled == ("print_iter_log: true",)


@pytest.mark.parametrize(("text", "waits"), [
    ("enable_attention_dp: true\nattention_dp_config:\n  enable_balance: true\n  timeout_iters: 60\n", 30),
    ("enable_attention_dp: true\nattention_dp_config:\n  enable_balance: true\n", 25),
    ("enable_attention_dp: true\nattention_dp_config:\n  enable_balance: false\n", None),
    ("enable_attention_dp: true\nattention_dp_config:\n", None),
    ("attention_dp_config:\n  enable_balance: true\n", None),  # no data-parallel attention: nobody to wait for
])
def test_trtllm_prompts_wait_for_prompts_on_all_ranks(tmp_path, text: str, waits: int | None) -> None:
    path = tmp_path / "o.yaml"
    path.write_text(text)
    parsed = parse_command(f"trtllm-serve a/b --tp_size 4 --extra_llm_api_options {path}")
    assert parsed.settings.get("batch_wait_timeout_iters") == waits
    assert parsed.settings.get("batch_wait_max_tokens_ratio") == (None if waits is None else 1.0)
    assert "attention_dp_config" not in parsed.settings and not parsed.unmodelled


def test_human_readable_integers_are_vllms() -> None:
    assert [engine_int(t) for t in ("8192", "8k", "8K", "25.6k", "1M", "2g")] == [
        8192, 8000, 8192, 25600, 1 << 20, 2 * 10**9]
    assert max_model_len("auto") == max_model_len("-1") == -1
    for bad in ("1.5K", "eight", "8kk", ""):
        with pytest.raises(SpecError):
            engine_int(bad)


def test_every_vllm_flag_is_read_with_its_arity() -> None:
    table = grammar("vllm")
    for name, flag in table.flags.items():
        values = {"switch": [], "boolean": [], "value": ["1"], "optional": ["1"], "list": ["1", "2"]}[flag.kind]
        if flag.dest in ("model", "config", "speculative_config", "compilation_config"):
            continue
        if flag.dest in ("dtype", "kv_cache_dtype"):
            values = ["auto"]
        if flag.dest in ("hf_overrides", "rope_scaling"):
            values = ['{"a": 1}']
        parsed = parse_command(shlex.join(["vllm", "serve", "org/model", name, *values, "--port", "1"]))
        assert parsed.model == "org/model", name
        assert parsed.unknown == (), name
        assert len(parsed.settings) + len(parsed.unmodelled) >= 1


_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=0, max_size=20)


@settings(deadline=None)
@given(st.lists(st.one_of(
    st.sampled_from(
        ["vllm", "serve", "--model", "a/b", "-tp", "--max-num-seqs", "--", "&&", "-O", "=", "{", "'", "\\"]),
    _VALUES), max_size=12))
def test_any_words_give_a_command_or_a_one_line_error(words: list[str]) -> None:
    for text in (" ".join(words), "vllm serve a/b " + " ".join(words), shlex.join(words)):
        try:
            parsed = parse_command(text)
        except BstarError as error:
            assert "\n" not in str(error)
        else:
            assert parsed.engine in ("vllm", "sglang", "trtllm")


@st.composite
def _deployments(draw: st.DrawFn) -> tuple[Deployment, dict[str, object]]:
    engine = draw(st.sampled_from(["vllm", "vllm@0.19.0", "sglang", "trtllm"]))
    moe = draw(st.booleans())
    length = draw(st.integers(1024, 131072))
    seqs = draw(st.integers(1, 1024))
    keywords: dict[str, object] = {
        "engine": engine, "max_num_seqs": seqs, "max_model_len": length,
        "max_num_batched_tokens": draw(st.integers(max(1024, seqs), 16384)),
        "gpu_memory_utilization": draw(st.integers(50, 99)) / 100,
        "tp": draw(st.sampled_from([1, 2, 4, 8])),
    }
    if moe and engine.startswith("vllm"):
        keywords["enable_expert_parallel"] = draw(st.booleans())
        keywords["dp"] = draw(st.sampled_from([1, 2]))
    if not engine.startswith("trtllm"):
        keywords["enable_prefix_caching"] = draw(st.booleans())
        keywords["kv_cache_dtype"] = draw(st.sampled_from(["auto", "fp8"]))
        keywords["enforce_eager"] = draw(st.booleans())
        keywords["async_scheduling"] = draw(st.booleans())
    if engine.startswith("vllm"):
        keywords["num_gpu_blocks_override"] = draw(st.one_of(st.none(), st.integers(1, 10**6)))
        keywords["block_size"] = draw(st.sampled_from([None, 16, 32, 64]))
        keywords["scheduling_policy"] = draw(st.sampled_from(["fcfs", "priority"]))
        keywords["long_prefill_token_threshold"] = draw(st.sampled_from([0, 2048]))
    return build_deployment(_model(moe=moe), "h100-sxm-80gb", **keywords), keywords  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(_deployments())
def test_a_formatted_command_builds_the_same_deployment(drawn: tuple[Deployment, dict[str, object]]) -> None:
    deployment, keywords = drawn
    parsed = parse_command(format_command(deployment, model="a/b"))
    assert (parsed.model, parsed.unmodelled, parsed.unknown) == ("a/b", (), ())
    rebuilt = build_deployment(
        deployment.model, deployment.device, **{**parsed.settings, "engine": str(keywords["engine"])})

    def normalised(d: Deployment) -> Deployment:
        fp8 = "fp8" if d.engine.kv_cache_dtype.startswith("fp8") else d.engine.kv_cache_dtype
        return replace(d, engine=replace(d.engine, kv_cache_dtype=fp8))

    assert normalised(rebuilt) == normalised(deployment)


def test_weights_that_are_not_the_checkpoints_say_how_they_are_made() -> None:
    def command(model: str, dtype: str) -> str:
        return format_command(build_deployment(model, "b200", weight_dtype=dtype, max_num_seqs=8))

    assert "--quantization fp8" in command("llama-3.1-8b", "fp8")
    assert command("llama-3.1-8b", "w4a16").endswith("# needs a w4a16 checkpoint")
    assert "quantization" not in command("llama-3.1-8b", "bf16")
    assert "#" not in command("deepseek-v3.1", "nvfp4") or "needs" in command("deepseek-v3.1", "nvfp4")
    assert "quantization" not in command("someone/Llama-3.1-8B-Instruct-FP8", "fp8")


def test_unmodelled_flags_ride_along() -> None:
    parsed = parse_command("vllm serve a/b --port 8000 --speculative-config '{\"num_speculative_tokens\": 2}'")
    deployment = build_deployment(_model(), "h100-sxm-80gb", unmodelled=parsed.unmodelled, **parsed.settings)
    again = parse_command(format_command(deployment, model="a/b"))
    assert again.unmodelled == parsed.unmodelled
    assert json.loads(again.unmodelled[1].split("'")[1]) == {"num_speculative_tokens": 2}


def test_rope_flags_and_overrides_change_the_config_and_ride_along() -> None:
    text = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-32B --rope-theta 2e6 --rope-scaling "
            "'{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}' "
            "--hf-overrides '{\"max_position_embeddings\": 131072}'")
    parsed = parse_command(text)
    assert set(parsed.settings["hf_overrides"]) == {"rope_theta", "rope_scaling", "max_position_embeddings"}
    assert parsed.settings["allow_long_max_model_len"] is True
    assert parsed.unmodelled == ()
    built = build_deployment(parsed.model, "h200", **parsed.settings)
    assert built.model.max_context_tokens == built.engine.max_model_len == 131072
    again = parse_command(format_command(built))
    assert again.settings["hf_overrides"] == parsed.settings["hf_overrides"]


def test_secrets_are_masked_wherever_they_stand() -> None:
    text = ("HF_TOKEN=hf_abcdefghij vllm serve a/b --api-key topsecret-1 --hf-token=topsecret-2 "
            "--my-password topsecret-3 --kv-transfer-config '{\"api_key\": \"topsecret-4\", \"kv_role\": \"kv_both\"}' "
            "--otlp-traces-endpoint http://me:topsecret-5@host --middleware sk-topsecret-6 --num-lookahead-slots 4")
    parsed = parse_command(text)
    shown = " ".join((*parsed.unmodelled, *parsed.unknown, *parsed.environment))
    assert "topsecret" not in shown
    assert "hf_abc" not in shown
    assert "kv_both" in shown
    assert "--num-lookahead-slots 4" in parsed.unmodelled
    built = build_deployment(_model(), "h100-sxm-80gb", unmodelled=("--api-key topsecret",))
    assert "topsecret" not in format_command(built)


def test_flags_that_change_nothing_are_told_from_those_that_may() -> None:
    parsed = parse_command("vllm serve a/b --port 1 --served-model-name x --enable-lora --api-key k --swap-space 4")
    assert set(parsed.unmodelled) - set(parsed.without_effect) == {"--enable-lora"}


def test_names_of_flags_without_effect_are_flags() -> None:
    from bstar.codec.engine_effects import WITHOUT_EFFECT

    known = {flag.dest for engine in ("vllm", "sglang", "trtllm") for flag in grammar(engine).flags.values()}
    assert known >= WITHOUT_EFFECT


def test_offloaded_weights_and_drafts_of_the_checkpoint_are_settings() -> None:
    parsed = parse_command("vllm serve a/b --cpu-offload-gb 10 --speculative-config "
                           "'{\"method\": \"deepseek_mtp\", \"num_speculative_tokens\": 1}'")
    assert parsed.unmodelled == ()
    assert dict(parsed.settings) == {"cpu_offload_bytes": 10 << 30, "num_speculative_tokens": 1,
                                     "speculative_method": "deepseek_mtp"}
    again = parse_command(format_command(build_deployment(_model(), "h100", **parsed.settings), model="a/b"))
    assert again.settings["cpu_offload_bytes"] == 10 << 30
    assert again.settings["speculative_method"] == "deepseek_mtp"


@pytest.mark.parametrize(("flags", "method"), [
    ("--speculative-model x/draft --num-speculative-tokens 5", "draft_model"),
    ("--speculative-model [ngram] --num-speculative-tokens 5", "ngram"),
    ("--speculative-config '{\"model\": \"x/draft\", \"num_speculative_tokens\": 5}'", "draft_model"),
    ("--speculative-config '{\"method\": \"eagle\", \"model\": \"x\", \"num_speculative_tokens\": 5}'", "eagle"),
    ("--spec-method ngram --spec-tokens 5", "ngram"),
])
def test_a_draft_model_is_not_taken_for_the_checkpoints_own_layers(flags: str, method: str) -> None:
    parsed = parse_command("vllm serve a/b " + flags)
    assert dict(parsed.settings) == {"num_speculative_tokens": 5, "speculative_method": method}
    assert parsed.unmodelled
    built = build_deployment(_model(), "h100", **parsed.settings)
    assert not built.engine.drafts_with_mtp
    assert any("neither the draft's memory" in note for note in built.engine.notes)


def test_attention_dp_of_tensorrt_llm_is_over_all_ranks() -> None:
    with pytest.raises(SpecError, match="all 8 ranks"):
        build_deployment(_model(moe=True), "h100", engine="trtllm", tp=4, attention_dp=2, ep=8)
    command = format_command(build_deployment(_model(moe=True), "h100", engine="trtllm", attention_dp=8, ep=8))
    assert "--tp_size 8" in command
    assert "# with `enable_attention_dp: true`" in command


def test_too_long_a_command_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_command("vllm serve a/b " + "x " * 100_000)
