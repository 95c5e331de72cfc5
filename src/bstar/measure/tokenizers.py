"""Text of exactly so many tokens: by the model's tokenizer, or by words where there is none.

The words are common ones: with the vocabularies of most models each of them, with the space before it, is one token.
What they are with the model at hand, the probe finds out by the server's own count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bstar.errors import ConfigError

_ROUNDS = 12
_MOST_PIECES, _FEWEST_PIECES = 4096, 64


class Tokenizer(Protocol):
    """What a text is in tokens."""

    exact: bool
    name: str

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def pieces(self, ids: Sequence[int]) -> list[int]: ...


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
        self._pool: list[int] = []

    @property
    def vocabulary_size(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[int]:
        """Tokens of plain text in place of `ids`, always the same for an id: bytes that are half a character, or
        text that is another token when it is read again, would change the length."""
        if not self._pool:
            self._pool = self._stable()
        return [self._pool[i % len(self._pool)] for i in ids]

    def _stable(self) -> list[int]:
        """Up to 4,096 ids spread over the vocabulary that are printable and read back as themselves."""
        size = self.vocabulary_size
        tried = range(0, size, max(size // _MOST_PIECES, 1))
        texts = [self.decode([i]) for i in tried]
        back = self._fast.encode_batch(texts, add_special_tokens=False)
        same = [(i, t) for i, t, b in zip(tried, texts, back, strict=True)
                if list(b.ids) == [i] and t.isprintable() and "\ufffd" not in t and t.strip()]  # fmt: skip
        words = [i for i, t in same if t.startswith(" ") and t[1:].isalpha()]  # these do not merge with neighbours
        return words if len(words) >= _FEWEST_PIECES else [i for i, _ in same] or list(tried)


class WordTokenizer:
    """No tokenizer: every id is a common word of `tokens_per_word` tokens."""

    exact = False
    name = "words"

    def __init__(self, tokens_per_word: float = 1.0) -> None:
        self.tokens_per_word = tokens_per_word

    def encode(self, text: str) -> list[int]:
        return [0] * round(len(text.split()) * self.tokens_per_word)

    def pieces(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        count = max(round(len(ids) / self.tokens_per_word), 1)
        return "".join(" " + _WORDS[i % len(_WORDS)] for i in list(ids)[:count])


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
    """A text made from `ids` that encodes to exactly `tokens` tokens, where the tokenizer allows it.

    Neighbours may merge when the text is read again, so it is cut or lengthened until the count is right; after a
    dozen rounds the nearest is taken.
    """
    pool = tokenizer.pieces(ids)
    text = tokenizer.decode(pool)
    if not tokenizer.exact:
        return text
    nearest = (tokens + 1, text)
    for turn in range(_ROUNDS):
        found = tokenizer.encode(text)
        nearest = min(nearest, (abs(len(found) - tokens), text), key=lambda pair: pair[0])
        if len(found) == tokens:
            break
        if len(found) > tokens:
            text = tokenizer.decode(found[:tokens])
        else:
            more = [pool[(turn + i) % len(pool)] for i in range(tokens - len(found))]
            text = tokenizer.decode(found + more)
    return nearest[1]
