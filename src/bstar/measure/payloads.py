"""Request bodies: JSON made once, so that sending is a write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from bstar.measure.contents import Prompt
from bstar.measure.endpoint import Api


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """What every request asks for beside its prompt and its length; the probe leaves out what a server refuses.

    ignore_eos      go on after the end token, so that answers are as long as asked
    min_tokens      the same wish in another word, for servers that refuse the first: it costs vLLM's sampler time
    include_usage   counts at the end of the stream
    continuous_usage   counts in every chunk
    return_token_ids   ids in every chunk
    extra           merged into the body as it is (sampling parameters)
    """

    api: Api = "completions"
    model: str = ""
    ignore_eos: bool = True
    min_tokens: bool = False
    include_usage: bool = True
    continuous_usage: bool = False
    return_token_ids: bool = False
    temperature: float | None = 0.0
    max_completion_tokens: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def without(self, name: str) -> BodyOptions:
        """Without one of the optional parts."""
        return replace(self, **{name: None if name == "temperature" else False})  # type: ignore[arg-type]

    @property
    def optional(self) -> tuple[str, ...]:
        """The optional parts that are asked for, the most exotic first."""
        names = ("return_token_ids", "continuous_usage", "min_tokens", "ignore_eos", "include_usage")
        return tuple(name for name in names if getattr(self, name))

    def tail(self, output_tokens: int) -> dict[str, Any]:
        """Everything but the prompt."""
        limit = "max_completion_tokens" if self.max_completion_tokens and self.api == "chat" else "max_tokens"
        body: dict[str, Any] = {limit: output_tokens, "stream": True}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = output_tokens
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        return body | self.extra

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """The JSON of one request."""
        head = b'{"model":' + json.dumps(self.model).encode()
        if prompt.messages is not None:
            head += b',"messages":' + json.dumps(prompt.messages).encode()
        elif prompt.ids is not None:
            head += b',"prompt":[' + ",".join(map(str, prompt.ids)).encode() + b"]"
        else:
            head += b',"prompt":' + json.dumps(prompt.text).encode()
        return head + b"," + json.dumps(self.tail(output_tokens)).encode()[1:]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens, "include_usage": self.include_usage,
            "continuous_usage": self.continuous_usage, "return_token_ids": self.return_token_ids,
            "temperature": self.temperature, "extra": self.extra,
        }  # fmt: skip
