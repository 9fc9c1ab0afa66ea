"""What an engine answered, checked before anybody believes it.

An answer is folded chunk by chunk into one list of tokens, whether the server sends everything so far in each chunk (SGLang's
default) or only what is new. A token is kept only when its id, its log-prob and its weight version are there and agree; anything
else is a malformed answer, which is the engine's failure and never a row. Tokens kept before a failure are its prefix: the caller
goes on from there at another engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

ErrorKind = Literal["infrastructure", "data", "configuration"]
FinishReason = Literal["stop", "length", "abort"]
Span = tuple[str, int, int]

# log_softmax in float32 may round the log-prob of a certain token to a hair above zero.
LOG_PROB_SLACK = 1e-4


@dataclass(frozen=True)
class Prefix:
    """Sampled tokens that arrived and passed the checks. `spans` are (version, start, end) over `output_ids`."""

    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Generation(Prefix):
    """A finished answer. `abort` means that the engine was told to stop: the tokens are good, the answer is not complete."""

    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


class EngineError(Exception):
    """A call to an engine that gave no answer.

    `kind` is `infrastructure` (try again, elsewhere), `data` (this prompt will fail everywhere) or `configuration` (a person must
    act). `prefix` holds the tokens that arrived before.
    """

    def __init__(self, kind: ErrorKind, message: str, *, status: int | None = None, prefix: Prefix | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.prefix = prefix or Prefix()


def joined(prefix: Prefix, rest: Generation) -> Generation:
    """The whole answer, when `rest` was generated from the prompt followed by `prefix`."""
    kept = len(prefix.output_ids)
    moved = [(version, start + kept, end + kept) for version, start, end in rest.spans]
    return replace(
        rest,
        output_ids=[*prefix.output_ids, *rest.output_ids],
        log_probs=[*prefix.log_probs, *rest.log_probs],
        spans=merged([*prefix.spans, *moved]),
        prompt_tokens=rest.prompt_tokens - kept,
    )


def merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one version become one span; empty ones (a version that made no token) go."""
    out: list[Span] = []
    for version, start, end in spans:
        if start == end:
            continue
        if out and out[-1][0] == version and out[-1][2] == start:
            out[-1] = (version, out[-1][1], end)
        else:
            out.append((version, start, end))
    return out


def malformed(what: str) -> EngineError:
    return EngineError("infrastructure", f"malformed answer: {what}")


def refusal(status: int, message: str) -> EngineError:
    """An HTTP status that is not 200, in our terms."""
    if status in (401, 403):
        remedy = "give the service the key that the engine was started with (--api-key or --admin-api-key)"
        return EngineError("configuration", f"engine refused the key ({status} {message}): {remedy}", status=status)
    if status == 404:
        remedy = "check that the engine's URL is that of an SGLang server of a supported version"
        return EngineError("configuration", f"engine does not know this call (404 {message}): {remedy}", status=status)
    kind: ErrorKind = "infrastructure" if status >= 500 or status in (408, 429) else "data"
    return EngineError(kind, f"engine answered {status}: {message}", status=status)


def error_text(body: bytes) -> str:
    """The message inside any of SGLang's error envelopes, or the start of the body as it is."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]


class EventSplitter:
    """Server-sent events out of a byte stream: feed bytes, get the payloads of the `data:` lines that are complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n") if b"\n" in data else [self._rest + data]
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """Folds the chunks of one /generate call into a Generation. Pure: no clock, no network."""

    def __init__(
        self, prompt_tokens: int, *, max_new_tokens: int | None = None, vocab_size: int | None = None, version: str | None = None
    ) -> None:
        """`version`: what the engine served when the request was sent."""
        self._prompt_tokens = prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._spans: list[Span] = []
        self._last_version = version
        self._sure: int | None = None
        self.generation: Generation | None = None

    @property
    def prefix(self) -> Prefix:
        """The tokens so far whose version is known: those before the first chunk that came with another one.

        A chunk carries the version of the moment it is sent. The first after a push may hold tokens from before it, and only the last
        chunk of an answer says which.
        """
        sure = len(self._ids) if self._sure is None else self._sure
        spans = [(version, start, min(end, sure)) for version, start, end in self._spans if start < sure]
        return Prefix(self._ids[:sure], self._log_probs[:sure], spans)

    def fold(self, payload: bytes) -> tuple[list[int], list[float], str]:
        """Take one chunk (or the whole unstreamed answer); returns the tokens, log-probs and version that are new in it."""
        chunk, meta = _parse(payload)
        finish = meta.get("finish_reason")
        _raise_if_failed(finish)
        start = len(self._ids)
        ids, log_probs = self._new_tokens(chunk.get("output_ids"), meta, aborted=(finish or {}).get("type") == "abort")
        self._check(ids, log_probs)
        version = meta.get("weight_version")
        if ids and not isinstance(version, str):
            raise malformed("weight_version is missing")
        if ids and self._sure is None and self._last_version not in (None, version):
            self._sure = start
        self._last_version = str(version) if ids else self._last_version
        self._ids += ids
        self._log_probs += log_probs
        if ids:
            self._extend_spans(str(version), start)
        if finish is not None:
            self._finish(finish, meta)
        return ids, log_probs, str(version)

    def _extend_spans(self, version: str, start: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            start = self._spans.pop()[1]
        self._spans.append((version, start, len(self._ids)))

    def _new_tokens(self, ids: Any, meta: Mapping[str, Any], *, aborted: bool) -> tuple[list[int], list[float]]:
        """What the chunk adds. `completion_tokens` is cumulative in both modes, so it tells a cumulative chunk from a delta."""
        if not isinstance(ids, list):
            raise malformed("output_ids is not a list")
        pairs = meta.get("output_token_logprobs") or []
        if not isinstance(pairs, list) or len(pairs) != len(ids):
            raise malformed(f"{len(ids)} tokens with {len(pairs) if isinstance(pairs, list) else 'no'} log-probs")
        have = len(self._ids)
        total = meta.get("completion_tokens")
        if aborted and total in (None, len(ids)):
            # An abort in the waiting queue leaves most fields out and may leave the tokens out too.
            skip = min(len(ids), have)
        elif total == len(ids):
            skip = have
        elif total == have + len(ids):
            skip = 0
        else:
            raise malformed(f"{len(ids)} tokens after {have}, but completion_tokens is {total}")
        if ids[:skip] != self._ids[:skip] or len(ids) < skip:
            self._ids, self._log_probs, self._spans = [], [], []
            raise malformed("tokens sent earlier have changed")
        new_ids, new_pairs = ids[skip:], pairs[skip:]
        try:
            same = [pair[1] for pair in new_pairs] == new_ids
            log_probs = [pair[0] for pair in new_pairs]
        except (TypeError, LookupError):
            same = False
        if not same:
            raise malformed("log-probs speak of other tokens than output_ids")
        return new_ids, log_probs

    def _check(self, ids: Sequence[Any], log_probs: Sequence[Any]) -> None:
        limit = self._vocab_size
        if ids and ({*map(type, ids)} != {int} or min(ids) < 0 or (limit is not None and max(ids) >= limit)):
            strange = next(token for token in ids if type(token) is not int or token < 0 or (limit is not None and token >= limit))
            raise malformed(f"{strange!r} is not a token of a vocabulary of {limit}")
        check_log_probs(log_probs)
        if self._max_new_tokens is not None and len(self._ids) + len(ids) > self._max_new_tokens:
            raise malformed(f"more than the {self._max_new_tokens} tokens asked for")

    def _finish(self, finish: Mapping[str, Any], meta: dict[str, Any]) -> None:
        reason: Any = finish.get("type")
        if reason not in ("stop", "length", "abort"):
            raise malformed(f"finish_reason {reason!r} is unknown")
        if meta.get("weight_versions") is not None:
            self._spans = _spans_of(meta["weight_versions"], len(self._ids))
            self._sure = None
        elif self._sure is not None:
            raise malformed("its last chunk does not say which weights made which of its tokens")
        if reason == "abort" and self._max_new_tokens is not None and len(self._ids) == self._max_new_tokens:
            reason = "length"  # aborted at the very moment it was complete
        self.generation = Generation(
            output_ids=self._ids,
            log_probs=self._log_probs,
            spans=self._spans,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            meta=meta,
        )


def check_log_probs(log_probs: Sequence[Any]) -> None:
    # Their sum is finite only if each of them is. Many at a time, for this runs for every token that is sampled.
    if log_probs and not ({*map(type, log_probs)} <= {float, int} and max(log_probs) <= LOG_PROB_SLACK and math.isfinite(sum(log_probs))):
        strange = next((value for value in log_probs if not _is_log_prob(value)), log_probs)
        raise malformed(f"{strange!r} is not a log-prob")


def _is_log_prob(value: Any) -> bool:
    return type(value) in (float, int) and math.isfinite(value) and value <= LOG_PROB_SLACK


def _parse(payload: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise malformed(f"not JSON ({error})") from error
    if not isinstance(chunk, dict):
        raise malformed("not one JSON object")
    if "error" in chunk:
        failure = chunk["error"]
        code = failure.get("code") if isinstance(failure, dict) else None
        raise refusal(code if isinstance(code, int) else 500, error_text(payload))
    meta = chunk.get("meta_info")
    if not isinstance(meta, dict):
        raise malformed("meta_info is missing")
    if not isinstance(meta.get("finish_reason"), (dict, type(None))):
        raise malformed("finish_reason is not an object")
    return chunk, meta


def _raise_if_failed(finish: Mapping[str, Any] | None) -> None:
    """Inside a stream the engine can only report a failed request as an abort that carries an HTTP status."""
    status = finish.get("status_code") if finish else None
    if isinstance(status, int) and status >= 400:
        assert finish is not None
        raise refusal(status, str(finish.get("message")))


def _spans_of(value: Any, length: int) -> list[Span]:
    try:
        spans = merged([(str(item["version"]), int(item["start"]), int(item["end"])) for item in value])
    except (TypeError, KeyError, ValueError) as error:
        raise malformed("weight_versions is not a list of version, start, end") from error
    edges = [0, *(end for _, _, end in spans)]
    if any(start != edge or end < start for (_, start, end), edge in zip(spans, edges, strict=False)) or edges[-1] != length:
        raise malformed(f"weight_versions {spans} do not cover {length} tokens")
    return spans
