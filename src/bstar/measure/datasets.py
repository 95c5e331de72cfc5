"""Prompts from files: ShareGPT-like JSON, or JSON lines of prompts, messages or token ids.

    ShareGPT   [{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}, …]
               the first question of each conversation is the prompt, its answer says how long an answer is asked for
    JSONL      a line a request: "prompt" (text or ids), "prompt_token_ids" or "messages", and, if there is one,
               "output_tokens" or "max_tokens" (a number) or "completion" (a text as long as what is asked for)

A trailing .gz is unpacked. Lengths in tokens need a tokenizer; without one four characters count as a token, and what
the prompts really are the server says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from bstar.errors import ConfigError
from bstar.measure.contents import Given
from bstar.measure.tokenizers import Tokenizer
from bstar.traffic.load import Traffic

Ints = NDArray[np.int64]

_CHARACTERS_PER_TOKEN = 4.0
_QUESTION, _ANSWER = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bot"}
_MOST_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Prompts in the order of the file.

    input_tokens, output_tokens   shape (n,); output_tokens is 0 where the file does not say
    exact    whether they are counted by a tokenizer
    texts    answers that the file gives as text
    skipped  entries without a prompt and an answer
    """

    name: str
    prompts: tuple[Given, ...]
    input_tokens: Ints
    output_tokens: Ints
    exact: bool
    texts: int = 0
    skipped: int = 0

    def load(self, arrivals: Traffic, *, output_tokens: int | None = None) -> Traffic:
        """`arrivals` with the lengths of these prompts, from the first again where there are more arrivals.

        output_tokens   asked of answers whose length the file does not say
        Raises ConfigError where that is needed and missing.
        """
        index = np.arange(arrivals.num_requests) % len(self.prompts)
        answers = self.output_tokens[index]
        if (answers == 0).any():
            if output_tokens is None:
                raise ConfigError(f"--dataset: {self.name} does not say how long answers are; give --output")
            answers = np.where(answers == 0, output_tokens, answers)
        return replace(arrivals, input_tokens=self.input_tokens[index], output_tokens=answers, source=self.name)

    def to_dict(self) -> dict[str, Any]:
        """What is told about it beside a run."""
        return {"name": self.name, "prompts": len(self.prompts), "skipped": self.skipped, "exact": self.exact,
                "guessed_answers": 0 if self.exact else self.texts}


def read_dataset(path: str | Path, *, tokenizer: Tokenizer | None = None) -> Dataset:
    """The prompts of a file. Raises ConfigError naming the file and the line."""
    file = Path(path)
    count = _counter(tokenizer)
    rows = list(_rows(file))
    prompts: list[Given] = []
    inputs: list[int] = []
    outputs: list[int] = []
    texts = skipped = 0
    for number, row in rows:
        found = _entry(row, file, number)
        if found is None:
            skipped += 1
            continue
        given, answer = found
        prompts.append(given)
        inputs.append(max(_length(given, count), 1))
        texts += isinstance(answer, str)
        outputs.append(answer if isinstance(answer, int) else max(count(answer), 1))
    if not prompts:
        raise ConfigError(f"--dataset: {file} holds no prompt; write JSON lines with a prompt, or ShareGPT's JSON")
    return Dataset(
        name=file.name, prompts=tuple(prompts), input_tokens=np.asarray(inputs, dtype=np.int64),
        output_tokens=np.asarray(outputs, dtype=np.int64), exact=tokenizer is not None and tokenizer.exact,
        texts=texts, skipped=skipped,
    )  # fmt: skip


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """(line or entry number, object)."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"--dataset: {file} is larger than 4 GB; cut it")
        with _opened(file) as lines:
            first = lines.read(1)
            while first.isspace():
                first = lines.read(1)
            lines.seek(0)
            if first == "[":
                yield from enumerate(json.load(lines), start=1)
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError:
                        raise ConfigError(f"--dataset: {file} line {number}: is no JSON; write one object a line"
                                          ) from None
    except OSError as error:
        raise ConfigError(f"--dataset: {file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset: {file} cannot be read as JSON ({str(error).splitlines()[0]})") from None


def _opened(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def _entry(row: Any, file: Path, number: int) -> tuple[Given, int | str] | None:
    """(prompt, tokens or text of the answer; 0 unknown); None for a conversation without both."""
    if not isinstance(row, dict):
        raise ConfigError(f"--dataset: {file} entry {number}: is no object")
    turns = row.get("conversations", row.get("conversation"))
    if isinstance(turns, list):
        return _first_pair(turns)
    answer = _answer(row, file, number)
    messages, ids, prompt = row.get("messages"), row.get("prompt_token_ids"), row.get("prompt", row.get("text"))
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Given(messages=tuple(messages)), answer
    for value in (ids, prompt):
        if isinstance(value, list) and value and all(isinstance(i, int) and i >= 0 for i in value):
            return Given(ids=tuple(value)), answer
    if isinstance(prompt, str) and prompt:
        return Given(text=prompt), answer
    raise ConfigError(f"--dataset: {file} entry {number}: has neither prompt, messages nor prompt_token_ids")


def _answer(row: dict[str, Any], file: Path, number: int) -> int | str:
    for key in ("output_tokens", "max_tokens", "output_len", "output_length"):
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"--dataset: {file} entry {number}: {key} must be a whole number of at least 1, "
                              f"is {value!r}")
        return value
    for key in ("completion", "output", "answer"):
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
    return 0


def _first_pair(turns: list[Any]) -> tuple[Given, str] | None:
    """The first question that has an answer right after it."""
    said = [(str(t.get("from", t.get("role", ""))).lower(), t.get("value", t.get("content"))) for t in turns
            if isinstance(t, dict)]  # fmt: skip
    for (who, question), (next_one, answer) in pairwise(said):
        both = isinstance(question, str) and isinstance(answer, str) and question.strip() and answer.strip()
        if who in _QUESTION and next_one in _ANSWER and both:
            return Given(text=question), str(answer)
    return None


def _length(given: Given, count: Callable[[str], int]) -> int:
    if given.ids is not None:
        return len(given.ids)
    if given.text is not None:
        return count(given.text)
    return sum(count(str(m.get("content", ""))) for m in given.messages or ())


def _counter(tokenizer: Tokenizer | None) -> Callable[[str], int]:
    if tokenizer is None or not tokenizer.exact:
        return lambda text: round(len(text) / _CHARACTERS_PER_TOKEN)
    return lambda text: len(tokenizer.encode(text))
