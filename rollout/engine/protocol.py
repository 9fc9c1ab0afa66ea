"""SGLang 0.5.23's wire types and the checks on what a client may ask, as far as this engine computes it.

Bodies are decoded strictly (a float for an int is refused). Unknown top-level keys of /generate are ignored and unknown sampling keys are
refused with the list of the allowed ones, both as SGLang does. What SGLang can and this engine cannot is a 400 that says so.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rollout.engine.request import ALL_TOP_K, GREEDY_TOP_K, Request, Sampling
from rollout.engine.settings import DEFAULT_SEED
from rollout.extras import Place

SAMPLING_EPSILON = 1e-6  # SGLang's: a temperature below it is greedy
MOST_STOPS = 32


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`. Null means the default everywhere. Whole numbers stay whole, for messages repeat what was sent."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: int | float | None = 1.0
    top_p: int | float | None = 1.0
    top_k: int | None = -1
    min_p: int | float | None = 0.0
    frequency_penalty: int | float | None = 0.0
    presence_penalty: int | float | None = 0.0
    repetition_penalty: int | float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Any = None
    choice: list[str] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """/generate. A list of lists in `input_ids`, or a list in `text`, is a batch, and the answer is then a list."""

    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    stream: bool = False
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_prompt_token_ids: bool = False
    return_text_in_logprobs: bool | None = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    headrace_extras: Place | None = None
    # Known to SGLang, not to this engine: refused when they ask for something, because ignoring them would give other numbers.
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_sampling_mask: Any = None
    lora_path: Any = None
    input_embeds: Any = None
    image_data: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None

    def __post_init__(self) -> None:
        if self.input_ids and len({isinstance(entry, list) for entry in self.input_ids}) == 2:
            raise ValueError("input_ids holds token ids and lists of them; send either")  # a ValidationError of the decoder's


class PauseBody(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(msgspec.Struct):
    torch_empty_cache: bool = True


class AbortBody(msgspec.Struct):
    rid: str | None = ""
    abort_all: bool = False


class MemoryBody(msgspec.Struct):
    tags: list[str] | None = None


class BeginBody(msgspec.Struct):
    selector: Literal["all", "target", "draft"] = "all"


class EndBody(msgspec.Struct):
    pass


class TensorUpdateBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class DiskUpdateBody(msgspec.Struct):
    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class DistributedUpdateBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class GroupBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupBody(msgspec.Struct):
    group_name: str = "weight_update_group"


class NameBody(msgspec.Struct):
    name: str
    truncate_size: int = 100


class VersionBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class CheckerBody(msgspec.Struct):
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None
    serialized_buckets: list[str] = []


class SlowDownBody(msgspec.Struct):
    forward_sleep_time: float | None


class Rejected(ValueError):
    """What SGLang finds only in its scheduler: a stream is then told by a chunk that ends it, not by an error event."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against. `has_text` says whether the engine has a tokenizer."""

    vocab_size: int
    context_length: int
    max_sequence: int
    max_prompt: int
    stream_interval: int
    deterministic: bool
    has_text: bool


def split_batch(body: GenerateBody) -> tuple[list[GenerateBody], bool]:
    """One body a request, and whether the answer is a list: for a batch, and for n > 1. ValueError when lists do not fit together."""
    bodies, batch = _each_prompt(body)
    if body.headrace_extras is not None and (batch or _samples(body) > 1):
        raise ValueError("headrace_extras names one key, for one prompt with n = 1")
    counts = {_samples(one) for one in bodies}
    if len(counts) > 1:
        raise ValueError("The parallel_sample_num should be the same for all samples in sample params.")
    count = counts.pop()
    if count == 1:
        return bodies, batch
    # The samples of one prompt have ids of their own: nobody can abort them by the caller's.
    return [msgspec.structs.replace(one, rid=None) for one in bodies for _ in range(count)], True


def _samples(body: GenerateBody) -> int:
    params = body.sampling_params
    return max(1, params.n or 1) if isinstance(params, SamplingParams) else 1


def _each_prompt(body: GenerateBody) -> tuple[list[GenerateBody], bool]:
    if body.input_ids is not None and not body.input_ids:
        raise ValueError("input_ids cannot be empty.")
    batch = body.input_ids if body.input_ids and isinstance(body.input_ids[0], list) else body.text if isinstance(body.text, list) else None
    if batch is None:
        if isinstance(body.rid, list):
            raise ValueError("rid is a list, but the request is one prompt; give one string")
        return [body], False
    size = len(batch)

    def each(name: str) -> list[Any]:
        value = getattr(body, name)
        if not isinstance(value, list):
            return [value] * size
        if len(value) != size:
            raise ValueError(f"{name} has {len(value)} entries for a batch of {size} prompts; give one for all, or one each")
        return value

    if isinstance(body.rid, list) and len(body.rid) != size:
        raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
    rids = [f"{body.rid}_{index}" for index in range(size)] if isinstance(body.rid, str) else each("rid")
    if body.rid is not None and len(set(rids)) != size:
        raise ValueError(f"Duplicate request IDs detected within the request: {sorted({rid for rid in rids if rids.count(rid) > 1})}")
    names = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    columns = {name: each(name) for name in names}
    key = "input_ids" if body.input_ids else "text"
    return [
        msgspec.structs.replace(body, **{key: batch[index], "rid": rids[index]}, **{name: columns[name][index] for name in names})
        for index in range(size)
    ], True


def make_request(body: GenerateBody) -> Request:
    """A request that holds its id; `complete` checks and fills it once it may pass. Raises nothing that depends on the model."""
    return Request(
        rid=str(body.rid) if body.rid else uuid.uuid4().hex,
        input_ids=[],
        sampling=Sampling(max_new_tokens=0),
        stream=bool(body.stream),
        return_logprob=bool(body.return_logprob),
        logprob_start_len=-1 if body.logprob_start_len is None else int(body.logprob_start_len),  # type: ignore[arg-type]
        top_logprobs_num=int(body.top_logprobs_num or 0),  # type: ignore[arg-type]
        return_prompt_token_ids=body.return_prompt_token_ids,
        routes_from=body.routed_experts_start_len if body.return_routed_experts else None,
    )


def complete(request: Request, body: GenerateBody, input_ids: list[Any], limits: Limits) -> None:
    """Check the prompt and the parameters against the model. ValueError, in SGLang's words where clients know them."""
    length, context = len(input_ids), limits.context_length
    if not input_ids:
        raise ValueError("the prompt is empty, and a real SGLang 0.5.23 dies of it; send at least one token")
    if request.logprob_start_len < -1:
        raise ValueError(f"logprob_start_len is {request.logprob_start_len}, and a real SGLang 0.5.23 dies of it; send -1 or more")
    if length >= context:
        raise ValueError(f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
    params = body.sampling_params
    params = params if isinstance(params, SamplingParams) else SamplingParams()
    if params.max_new_tokens is not None and length + params.max_new_tokens > context and body.sampling_params is not None:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of "
            f"{length + params.max_new_tokens} tokens: {length} tokens from the input messages and {params.max_new_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit."
        )
    if length >= limits.max_prompt:
        raise Rejected(
            f"Input length ({length} tokens) exceeds the maximum allowed length ({limits.max_prompt} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    strange = next((token for token in input_ids if not 0 <= token < limits.vocab_size), None)
    if strange is not None:
        raise ValueError(
            f"input_ids holds {strange!r}, which is no token id of this model (0 to {limits.vocab_size - 1}); "
            "a real SGLang 0.5.23 dies of it"
        )
    if request.routes_from is not None and not 0 <= request.routes_from <= length:
        raise ValueError(f"routed_experts_start_len is {request.routes_from}; it must be in [0, {length}], the prompt's tokens")
    if request.logprob_start_len > length:
        raise Rejected(
            f"req.logprob_start_len={request.logprob_start_len} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={length}. Please use a smaller logprob_start_len."
        )
    request.input_ids = input_ids
    request.sampling = check_sampling(params, limits, room=max(0, limits.max_sequence - length - 1))
    _refuse_unknown(body, params)


def check_sampling(params: SamplingParams, limits: Limits, room: int) -> Sampling:
    """Defaults for nulls, SGLang's ranges in SGLang's order, and at most `room` new tokens."""
    temperature = 1.0 if params.temperature is None else params.temperature
    top_p = 1.0 if params.top_p is None else params.top_p
    top_k = -1 if params.top_k is None else params.top_k
    min_p = params.min_p or 0.0
    frequency, presence = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
    repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
    least, most = params.min_new_tokens or 0, room if params.max_new_tokens is None else params.max_new_tokens
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    strange_bias = next((key for key in params.logit_bias or {} if not 0 <= int(key) < limits.vocab_size), None)
    if 0.0 <= temperature < SAMPLING_EPSILON:
        temperature, top_k = 1.0, GREEDY_TOP_K
    checks = (
        (0.0 <= temperature < float("inf"), f"temperature must be a non-negative finite number, got {temperature}."),
        (0.0 < top_p <= 1.0, f"top_p must be in (0, 1], got {top_p}."),
        (0.0 <= min_p <= 1.0, f"min_p must be in [0, 1], got {min_p}."),
        (top_k == -1 or top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {top_k}."),
        (-2.0 <= frequency <= 2.0, f"frequency_penalty must be in [-2, 2], got {frequency}."),
        (-2.0 <= presence <= 2.0, f"presence_penalty must be in [-2, 2], got {presence}."),
        (0.0 < repetition <= 2.0, f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {repetition}."),
        (least >= 0, f"min_new_tokens must be in [0, max_new_tokens], got {least}."),
        (most >= 0, f"max_new_tokens must be at least 0, got {most}."),
        (least <= most, f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}."),
        (strange_bias is None, f"logit_bias must has keys in [0, {limits.vocab_size - 1}], got {strange_bias}."),
        (-(2**63) <= (params.sampling_seed or 0) < 2**63, f"sampling_seed must be in [-2**63, 2**63 - 1], got {params.sampling_seed}."),
        (len(stops) <= MOST_STOPS, f"at most {MOST_STOPS} stop strings are allowed, got {len(stops)}"),
        (not stops or limits.has_text, "stop strings need a tokenizer, and this engine runs without one; use stop_token_ids."),
    )
    for holds, message in checks:
        if not holds:
            raise ValueError(message)
    return Sampling(
        max_new_tokens=min(most, room),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=ALL_TOP_K if top_k == -1 else top_k,
        min_p=float(min_p),
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        stop=stops,
        ignore_eos=bool(params.ignore_eos),
        seed=DEFAULT_SEED if params.sampling_seed is None and limits.deterministic else params.sampling_seed,
        stream_interval=params.stream_interval or limits.stream_interval,
        skip_special_tokens=params.skip_special_tokens is not False,
        no_stop_trim=bool(params.no_stop_trim),
    )


def _refuse_unknown(body: GenerateBody, params: SamplingParams) -> None:
    asked = {
        "beam_width": params.beam_width not in (None, 1),
        "min_new_tokens": bool(params.min_new_tokens),
        "frequency_penalty": bool(params.frequency_penalty),
        "presence_penalty": bool(params.presence_penalty),
        "repetition_penalty": params.repetition_penalty not in (None, 1.0),
        "return_text_in_logprobs": bool(body.return_text_in_logprobs),
    }
    for name in ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark", "choice"):
        asked[name] = bool(getattr(params, name))
    unsupported = (
        "token_ids_logprob",
        "return_hidden_states",
        "return_sampling_mask",
        "lora_path",
        "input_embeds",
        "image_data",
        "session_params",
    )
    for name in (*unsupported, "custom_logit_processor"):
        asked[name] = bool(getattr(body, name))
    for name, wanted in asked.items():
        if wanted:
            raise ValueError(f"the embedded engine does not do {name}: leave it out, or use an SGLang server")
