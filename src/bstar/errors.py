"""The exceptions of bstar, split by what the user can do about them.

    BstarError                     anything bstar itself raises on purpose
    ├── InputError                 the user gave something that cannot be used: one line, exit code 2
    │   ├── UnitError              a size, time, rate or length that does not parse
    │   ├── SpecError              a value outside its range, or two settings that contradict each other
    │   ├── ConfigError            a config.json, header, trace or spec file that cannot be read
    │   │   └── UnsupportedArchitectureError   a model whose mechanism is not understood
    │   └── NotInCatalogError      an unknown model, device or engine name
    └── InfeasibleError            the question is well posed and the answer is "no": exit code 1

Every message names the field at fault and the remedy, in one line. Anything that is not a
`BstarError` is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class BstarError(Exception):
    """Base of every error that bstar raises on purpose."""

    exit_code = 2


class InputError(BstarError):
    """The user's input cannot be used; the message says which field and what to do."""


class UnitError(InputError):
    """A size, time, rate or length that does not parse."""


class SpecError(InputError):
    """A value outside its range, or settings that contradict each other."""


class ConfigError(InputError):
    """A file that cannot be read as what it should be."""


class UnsupportedArchitectureError(ConfigError):
    """A model whose mechanisms are not understood.

    `keys` names the config keys (or values) that were not understood.
    """

    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class NotInCatalogError(InputError):
    """A model, device or engine name that the catalog does not hold."""

    def __init__(self, kind: str, name: str, *, suggestions: Sequence[str] = (), remedy: str = "") -> None:
        hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{kind}: {name!r} is not in the catalog{hint}{tail}")
        self.kind = kind
        self.name = name
        self.suggestions = tuple(suggestions)


class InfeasibleError(BstarError):
    """The question has no feasible answer; `reasons` says why, one line each."""

    exit_code = 1

    def __init__(self, message: str, *, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)
