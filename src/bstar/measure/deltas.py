"""The JSON objects of a completion stream, as OpenAI-compatible servers write them.

    completions   {"choices": [{"text": "…", "finish_reason": null}], "usage": null}
    chat          {"choices": [{"delta": {"role": …, "content": …, "reasoning_content": …}, "finish_reason": …}]}
    usage         {"choices": [], "usage": {"prompt_tokens": …, "completion_tokens": …}}, last or in every chunk

vLLM adds `token_ids` to a choice where `return_token_ids` was asked for, and running counts to every chunk with
`continuous_usage_stats`: both say how many tokens a chunk holds.
"""

from __future__ import annotations

import json
from typing import Any

from bstar.measure.outcome import BLANK, FINAL, ROLE, TEXT, Outcome
from bstar.measure.sse import DONE

_loads = json.loads


class StreamError(ValueError):
    """The server said inside the stream that it failed."""


class ChunkError(ValueError):
    """An event that is no JSON object of a completion stream."""


def take(payload: bytes, outcome: Outcome, now_s: float) -> None:
    """Enter one event into `outcome`. Raises StreamError or ChunkError."""
    if payload == DONE or payload.strip() == DONE:
        outcome.done = True
        return
    try:
        event = _loads(payload)
    except ValueError:
        raise ChunkError(f"an event is no JSON: {payload[:80]!r}") from None
    if type(event) is not dict:
        raise ChunkError(f"an event is no JSON object: {payload[:80]!r}")
    choices = event.get("choices")
    usage = event.get("usage")
    before = outcome.completion_tokens
    if type(usage) is dict:
        _usage(usage, outcome)
    if not choices:
        if choices is None and usage is None:
            _other(event, payload)
        return
    if type(choices) is not list or type(choices[0]) is not dict:
        raise ChunkError(f"choices is no list of objects: {payload[:80]!r}")
    choice = choices[0]
    kind, text = _kind(choice, bool(outcome.chunk_kind))
    finish = choice.get("finish_reason")
    if finish is not None:
        outcome.finish_reason = str(finish)
        if kind in (BLANK, ROLE):
            kind = FINAL
    tokens = 0
    ids = choice.get("token_ids")
    if type(ids) is list:
        tokens = len(ids) or -1
        if outcome.answer_ids is not None:
            outcome.answer_ids += ids
    elif usage is not None and type(usage) is dict:
        tokens = outcome.completion_tokens - max(before, 0)
        tokens = tokens if tokens > 0 else -1
    elif kind == ROLE:
        tokens = -1
    outcome.chunk_s.append(now_s)
    outcome.chunk_kind.append(kind)
    outcome.chunk_tokens.append(tokens)
    if text and outcome.text is not None:
        outcome.text.append(text)


def _kind(choice: dict[str, Any], begun: bool) -> tuple[int, str]:
    """What a choice is, and its text."""
    text = choice.get("text")
    if text:
        return TEXT, text
    delta = choice.get("delta")
    if type(delta) is not dict:
        return BLANK, ""
    content = delta.get("content")
    if content:
        return TEXT, content if type(content) is str else ""
    for name in ("reasoning_content", "reasoning", "refusal"):
        text = delta.get(name)
        if text:
            return TEXT, text if type(text) is str else ""
    if delta.get("tool_calls") or delta.get("function_call"):
        return TEXT, ""
    return (ROLE if not begun and "role" in delta else BLANK), ""


def _usage(usage: dict[str, Any], outcome: Outcome) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        value = usage.get(name)
        if type(value) is int and value >= 0:
            setattr(outcome, name, value)
    details = usage.get("prompt_tokens_details")
    if type(details) is dict and type(details.get("cached_tokens")) is int:
        outcome.cached_tokens = details["cached_tokens"]


def _other(event: dict[str, Any], payload: bytes) -> None:
    """An event with neither choices nor usage: an error, or something that is no completion stream."""
    error = event.get("error")
    if error is not None or event.get("object") == "error":
        message = error.get("message") if isinstance(error, dict) else error or event.get("message")
        raise StreamError(" ".join(str(message).split())[:300])
    if not event.get("id") and not event.get("object"):
        raise ChunkError(f"an event has neither choices nor usage: {payload[:80]!r}")
