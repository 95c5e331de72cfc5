"""What a server is and takes, found out before a load is spent on it: one plain request, sent as the load will be."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bstar.errors import ConfigError, SpecError
from bstar.measure.clock import now
from bstar.measure.connection import Pool
from bstar.measure.contents import Prompt, Vocabulary
from bstar.measure.endpoint import Endpoint
from bstar.measure.exchange import Exchange
from bstar.measure.failures import meaning, of_exception, tls_remedy
from bstar.measure.job import TextSource
from bstar.measure.keys import hide
from bstar.measure.outcome import Outcome
from bstar.measure.payloads import BodyOptions
from bstar.measure.tokenizers import LocalTokenizer, WordTokenizer

_FIRST_ID: Final = 10
# Every vocabulary of a served language model that we know of is larger; ids beyond a vocabulary can crash a server.
_USUAL_VOCABULARY: Final = 31_000
_PROBE_TOKENS, _PROBE_WORDS = 2, (40, 200)
_REFUSED = frozenset({400, 404, 405, 413, 415, 422, 501})


class ServerError(ConfigError):
    """The server cannot be measured: nothing listens, or it refuses a plain request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the probe found.

    engine            "vllm", "sglang", "llama.cpp", "tgi", "trtllm", or "" where nothing tells
    max_model_len     longest request, where the server says
    vocabulary_size   tokens that the model knows, likewise (llama.cpp)
    dropped           optional parts of a request that it refuses
    counts_tokens     whether streams end with usage
    """

    model: str
    engine: str = ""
    version: str = ""
    max_model_len: int | None = None
    vocabulary_size: int | None = None
    model_root: str = ""
    dropped: tuple[str, ...] = ()
    counts_tokens: bool = True
    takes_ids: bool = False
    overhead_tokens: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v
                for name in self.__dataclass_fields__}  # fmt: skip


def addresses_of(endpoint: Endpoint) -> tuple[tuple[str, int], ...]:
    """The addresses of the server that take a connection. Raises ServerError where none does."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ServerError(f"--url: {endpoint.host} is no host that is known here ({error})") from None
    every = list(dict.fromkeys((str(item[4][0]), int(item[4][1])) for item in found))
    good, last = [], ""
    for address in every:
        try:
            socket.create_connection(address, timeout=min(endpoint.timeouts.connect_s, 10.0)).close()
            good.append(address)
        except OSError as error:
            last = of_exception(error)[1]
    if not good:
        raise ServerError(f"--url: nothing answers at {endpoint.url} ({last}); is the server up?")
    return tuple(good)


def get_json(endpoint: Endpoint, path: str, *, timeout_s: float = 10.0) -> tuple[int, Any]:
    """(status, JSON) of a GET beside the load; None where it is no JSON. Raises OSError or HTTPException."""
    secret = endpoint.key.read()
    context = endpoint.ssl_context()
    if context is None:
        link = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    else:
        link = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
    headers = dict(endpoint.headers)
    if secret is not None:
        headers["Authorization"] = f"Bearer {secret.reveal()}"
    try:
        link.request("GET", endpoint.base + path, headers=headers)
        answer = link.getresponse()
        data = answer.read(4_000_000)
    finally:
        link.close()
    try:
        return answer.status, json.loads(data) if answer.status == 200 else None
    except ValueError:
        return answer.status, None


def ask_once(
    endpoint: Endpoint, addresses: Sequence[tuple[str, int]], body: bytes, *, output_tokens: int, timeout_s: float = 120
) -> Outcome:
    """One request, sent and read as those of the load."""

    async def run() -> Outcome:
        loop = asyncio.get_running_loop()
        pool = Pool(loop, addresses, context=endpoint.ssl_context(), server_name=endpoint.host,
                    connect_timeout_s=endpoint.timeouts.connect_s)  # fmt: skip
        over = loop.create_future()
        moment = now()
        outcome = Outcome(0, moment, moment)
        outcome.sent_s = moment

        def finished(_: Exchange) -> None:
            if not over.done():
                over.set_result(None)

        exchange = Exchange(outcome, endpoint.request(endpoint.path, body, endpoint.key.read()), finished,
                            output_tokens=output_tokens)
        try:
            exchange.start(await pool.open(), now())
            await asyncio.wait_for(over, timeout_s)
        except TimeoutError:
            exchange.give_up("timeout", f"after {timeout_s:g} s", now())
        except Exception as error:
            exchange.give_up(*of_exception(error), now())
        finally:
            pool.close()
        return outcome

    return asyncio.run(run())


@dataclass(slots=True)
class _Probe:
    """Tries until the server takes a request."""

    endpoint: Endpoint
    addresses: Sequence[tuple[str, int]]
    refusal: Outcome | None = None

    def ask(self, options: BodyOptions, prompt: Prompt, tokens: int = _PROBE_TOKENS) -> Outcome:
        outcome = ask_once(self.endpoint, self.addresses, options.body(prompt, tokens), output_tokens=tokens)
        if outcome.error and outcome.status not in _REFUSED:
            text = hide(outcome.error_text, self.endpoint.key.read())
            hint = "; is this an OpenAI-compatible API? check --url" if outcome.error.startswith("malformed") else ""
            why = text or meaning(outcome.error)
            raise ServerError(f"server: a plain request fails: {outcome.error} ({why}){hint}")
        return outcome

    def accepted(self, options: BodyOptions, prompt: Prompt) -> tuple[BodyOptions, Outcome] | None:
        """The most of `options` that the server takes with this prompt; None where it takes none."""
        outcome = self.ask(options, prompt)
        if not outcome.error:
            return options, outcome
        bare = options
        for name in options.optional:
            bare = bare.without(name)
        last = self.ask(bare, prompt)
        if last.error and bare.api == "chat" and not bare.max_completion_tokens:  # the newer name of max_tokens
            bare = replace(bare, max_completion_tokens=True)
            last = self.ask(bare, prompt)
        if last.error:
            self.refusal = last
            return None
        kept = bare
        for name in options.optional[::-1]:
            candidate = replace(kept, **{name: True})  # type: ignore[arg-type]
            outcome = self.ask(candidate, prompt)
            if not outcome.error:
                kept, last = candidate, outcome
            elif name == "ignore_eos" and not kept.min_tokens:
                candidate = replace(kept, min_tokens=True)
                outcome = self.ask(candidate, prompt)
                if not outcome.error:
                    kept, last = candidate, outcome
        return kept, last


def identify(endpoint: Endpoint) -> ServerFacts:
    """Model, engine and limits, as far as GET requests tell. Raises ServerError where the model is not served."""
    try:
        status, models = get_json(endpoint, "/v1/models")
        version = get_json(endpoint, "/version")[1]
    except (OSError, http.client.HTTPException) as error:
        kind, text = of_exception(error)
        raise ServerError(f"server: {endpoint.url}: {meaning(kind)} ({text}){tls_remedy(error)}") from None
    if status in (401, 403):
        raise ServerError(f"server: {endpoint.url} answers with status {status}: the API key is missing or wrong; put "
                          "it into the environment (OPENAI_API_KEY, or --api-key-env NAME)")
    if 300 <= status < 400:
        raise ServerError(f"server: {endpoint.url} redirects (status {status}); give the address that it leads to")
    listed = models.get("data") if isinstance(models, dict) else None
    entries = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    wanted = endpoint.model
    found = next((m for m in entries if m.get("id") == wanted), None)
    if wanted and entries and found is None and any(m.get("id") for m in entries):
        names = ", ".join(str(m.get("id")) for m in entries[:5])
        raise ServerError(f"--model: the server does not serve {wanted!r}; it serves {names}")
    if not wanted:
        if not entries or not entries[0].get("id"):
            said = f"answers with status {status}" if status != 200 else "lists no model"
            raise SpecError(f"--model: {endpoint.url}/v1/models {said}; check --url, or give --model NAME")
        found = entries[0]
        wanted = str(found["id"])
    found = found or {}
    owner = str(found.get("owned_by", "")).lower()
    engine = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}.get(owner, "")
    meta = found.get("meta")  # of llama.cpp: n_ctx is one slot's
    meta = meta if isinstance(meta, dict) else {}
    return ServerFacts(
        model=wanted, engine=engine, version=str(version.get("version", "")) if isinstance(version, dict) else "",
        max_model_len=_positive(found.get("max_model_len")) or _positive(meta.get("n_ctx")),
        vocabulary_size=_positive(meta.get("n_vocab")), model_root=str(found.get("root", "")),
    )  # fmt: skip


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def probe(
    endpoint: Endpoint, addresses: Sequence[tuple[str, int]], facts: ServerFacts, options: BodyOptions,
    text: TextSource, *, drawn: bool = True,
) -> tuple[ServerFacts, BodyOptions, TextSource]:  # fmt: skip
    """Which request the server takes, and how prompts are made for it.

    drawn   whether prompts are drawn (else a data set gives them, and only the request is tried)
    Raises ServerError where it takes none.
    """
    tester = _Probe(endpoint, addresses)
    notes: list[str] = []
    if drawn and (text.as_ids or text.tokenizer_file is not None):
        text = replace(text, vocabulary=vocabulary_of(facts, text))
    if drawn and text.as_ids and options.api == "completions":
        last = text.vocabulary.last
        found = tester.accepted(options, Prompt(ids=[text.vocabulary.first, last, last - 1, last]))
        if found is not None:
            return _facts(facts, options, found, notes, takes_ids=True), found[0], text
        notes.append("the server takes no token ids: prompts are text")
    text = replace(text, as_ids=False)
    found, sizes = _by_words(tester, options, 2 if drawn and text.tokenizer_file is None else 1)
    if drawn and text.tokenizer_file is not None:
        local = LocalTokenizer(text.tokenizer_file)
        if sizes[0].tokens >= 0:
            text = replace(text, overhead_tokens=max(sizes[0].tokens - len(local.encode(sizes[0].text)), 0))
    elif drawn and sizes[0].tokens < 0:
        notes.append("the server counts no prompt tokens and there is no --tokenizer: a word is taken as a token")
    elif drawn:
        few, many = sizes
        per_word = max((many.tokens - few.tokens) / (many.words - few.words), 0.1)
        text = replace(text, tokens_per_word=per_word,
                       overhead_tokens=max(round(few.tokens - few.words * per_word), 0))  # fmt: skip
        if per_word != 1.0:
            notes.append("prompts are words, of about as many tokens as asked; give --tokenizer for exact lengths")
    return _facts(facts, options, found, notes, overhead_tokens=text.overhead_tokens), found[0], text


class _Sized(NamedTuple):
    """A text of so many words, and the tokens that the server counted in it (-1: it does not)."""

    words: int
    tokens: int
    text: str


def _by_words(tester: _Probe, options: BodyOptions, rounds: int) -> tuple[tuple[BodyOptions, Outcome], list[_Sized]]:
    """What the server takes with plain text, and how it counts it."""
    words, sizes = WordTokenizer(), []
    kept = (options, Outcome(0, 0.0, 0.0))
    for count in _PROBE_WORDS[:rounds]:
        said = words.decode(list(range(count)))
        found = tester.accepted(kept[0], _as_prompt(options, said))
        if found is None:
            refusal = tester.refusal
            why = hide(refusal.error_text, tester.endpoint.key.read()) if refusal is not None else ""
            raise ServerError(f"server: refuses a plain request: {refusal.error if refusal else ''} {why}".rstrip())
        kept = found
        sizes.append(_Sized(count, found[1].prompt_tokens, said))
    return kept, sizes


def vocabulary_of(facts: ServerFacts, text: TextSource) -> Vocabulary:
    """Ids that the model surely has, by the server, the tokenizer, the model's folder or the catalog; else the fewest
    that are usual."""
    size = facts.vocabulary_size
    if text.tokenizer_file is not None:
        size = LocalTokenizer(text.tokenizer_file).vocabulary_size
    if size is None and facts.model_root:
        size = _config_size(Path(facts.model_root) / "config.json")
    if size is None:
        from bstar.catalog.models import get_entry

        entry = next((e for e in map(get_entry, (facts.model_root, facts.model)) if e is not None), None)
        value = entry.config.get("vocab_size") if entry is not None else None
        size = value if isinstance(value, int) else None
    size = size or _USUAL_VOCABULARY
    # Special tokens are at either end.
    return Vocabulary(first=min(_FIRST_ID, size // 4), last=max(size - max(size // 20, 2), 1))


def _config_size(file: Path) -> int | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("vocab_size") if file.is_file() else None
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int) and value > 8 else None


def _as_prompt(options: BodyOptions, text: str) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}]) if options.api == "chat" else Prompt(text=text)


def _facts(
    facts: ServerFacts, asked: BodyOptions, found: tuple[BodyOptions, Outcome], notes: list[str], **more: Any
) -> ServerFacts:
    kept, outcome = found
    dropped = tuple(name for name in asked.optional if name not in kept.optional)
    if dropped:
        notes.append(f"the server refuses {', '.join(dropped)}: left out")
    counts = outcome.completion_tokens >= 0
    return replace(facts, dropped=dropped, counts_tokens=counts, notes=tuple(notes), **more)
