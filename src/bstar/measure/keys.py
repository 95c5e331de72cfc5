"""The API key: from the environment, in no file, log or traceback."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from bstar.errors import SpecError

DEFAULT_VARIABLES: Final = ("BSTAR_API_KEY", "OPENAI_API_KEY")
HIDDEN: Final = "***"


class Secret:
    """A text that shows as *** wherever it is printed, and that cannot be pickled by mistake."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The text itself, for the one header that needs it."""
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    __str__ = __repr__

    def __format__(self, _spec: str) -> str:
        return HIDDEN

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("an API key is not written anywhere; it is read from the environment where it is used")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySource:
    """Which environment variable holds the key (None: the first of the usual ones that is set)."""

    variable: str | None = None

    def read(self) -> Secret | None:
        """The key, or None where there is none. Raises SpecError, which never shows it, where no header can hold it."""
        for name in (self.variable,) if self.variable else DEFAULT_VARIABLES:
            value = os.environ.get(name, "").strip()
            if value:
                if not value.isascii() or not value.isprintable():
                    raise SpecError(f"{name}: the API key holds a line break or a character outside ASCII; set it anew")
                return Secret(value)
        return None


def hide(text: str, secret: Secret | None) -> str:
    """`text` without the key: a server may send it back in an error."""
    if secret is None or not secret.reveal():
        return text
    return text.replace(secret.reveal(), HIDDEN)
