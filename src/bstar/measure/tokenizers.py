"""Text of exactly so many tokens: by the model's tokenizer, by the server's own, or by words where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bstar.errors import ConfigError

_ROUNDS = 12


class Tokenizer(Protocol):
    """What a text is in tokens."""

    exact: bool
    name: str

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class LocalTokenizer:
    """A tokenizer.json, by the `tokenizers` package."""

    exact = True

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            from tokenizers import Tokenizer as Fast  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ConfigError("--tokenizer: needs the tokenizers package; pip install tokenizers") from None
        try:
            self._fast: Any = Fast.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"--tokenizer: {file} cannot be read: {str(error).splitlines()[0]}") from None
        self.name = f"tokenizer {file.parent.name or file.name}"

    @property
    def vocabulary_size(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


class ServerTokenizer:
    """The server's own /tokenize and /detokenize; `ask(path, body)` posts JSON and returns the JSON answer."""

    exact = True
    name = "the server's /tokenize"

    def __init__(self, ask: Callable[[str, dict[str, Any]], dict[str, Any]], *, model: str) -> None:
        self._ask, self._model = ask, model

    def encode(self, text: str) -> list[int]:
        # vLLM reads prompt, llama.cpp content; each ignores the other.
        body = {"model": self._model, "prompt": text, "content": text, "add_special_tokens": False}
        found = self._ask("/tokenize", body)
        tokens = found.get("tokens")
        if not isinstance(tokens, list):
            raise ConfigError("server: its /tokenize answers without tokens; give --tokenizer")
        return [int(t) for t in tokens]

    def decode(self, ids: Sequence[int]) -> str:
        found = self._ask("/detokenize", {"model": self._model, "tokens": list(ids)})
        text = found.get("prompt", found.get("content"))
        if not isinstance(text, str):
            raise ConfigError("server: its /detokenize answers without text; give --tokenizer")
        return text


class WordTokenizer:
    """No tokenizer: every id is a short word. How many tokens a word really is, the server's usage tells."""

    exact = False
    name = "words"

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self.tokens_per_word = tokens_per_word

    def encode(self, text: str) -> list[int]:
        return [0] * round(len(text.split()) * self.tokens_per_word)

    def decode(self, ids: Sequence[int]) -> str:
        count = max(round(len(ids) / self.tokens_per_word), 1)
        return " ".join(_WORDS[i % len(_WORDS)] for i in list(ids)[:count]) + " "


_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back "
    "parent face others level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education foot boy age policy music process sense death plan land letter"
)
_WORDS = tuple(_TEXT.split())


def text_of_length(tokenizer: Tokenizer, ids: list[int], tokens: int) -> str:
    """A text of about these ids that encodes to exactly `tokens` tokens, where the tokenizer allows it.

    Decoding and encoding again merges tokens, so the ids are cut or lengthened until the count is right
    (`tokens` tokens or, after a dozen rounds, the nearest below).
    """
    text = tokenizer.decode(ids)
    if not tokenizer.exact:
        return text
    pool, best = list(ids), text
    for _ in range(_ROUNDS):
        found = tokenizer.encode(text)
        if len(found) == tokens:
            return text
        if len(found) > tokens:
            found = found[:tokens]
            best = text = tokenizer.decode(found)
        else:
            best = text
            missing = tokens - len(found)
            text = tokenizer.decode(found + (pool * (missing // len(pool) + 1))[:missing])
    return best
