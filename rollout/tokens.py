"""The model's own tokenizer and chat template, without torch.

Reads the files of a Hugging Face checkpoint directory. A prompt given as text goes to the model as it is; a list of messages goes
through the model's chat template, with the opening of the assistant's turn at its end. The template is a program that came with the
weights, so it is rendered in jinja2's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TokenizerView:
    """Text to token ids and back for one checkpoint directory.

    `eos_ids` are all tokens that end an answer (of the generation config, the model config and the tokenizer, as engines do it);
    `vocab_size` is the number of ids that the model can sample.
    """

    def __init__(self, model_path: str | Path) -> None:
        directory = Path(model_path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file} does not exist; give the directory of a Hugging Face checkpoint that has a fast tokenizer")
        self.model_path = directory
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer ({error}); copy the checkpoint again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _json(directory / "tokenizer_config.json")
        config = _json(directory / "config.json")
        self._special = {name: _token_text(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)}
        self._template = _compile(_template_text(directory, settings))
        self.vocab_size: int = config.get("vocab_size") or self._tokenizer.get_vocab_size()
        self.eos_ids = self._find_eos_ids(_json(directory / "generation_config.json"), config)

    def _find_eos_ids(self, *configs: Mapping[str, Any]) -> tuple[int, ...]:
        found: list[int | None] = [self._tokenizer.token_to_id(self._special["eos_token"])] if "eos_token" in self._special else []
        for config in configs:
            eos = config.get("eos_token_id")
            found += eos if isinstance(eos, list) else [eos]
        return tuple(sorted({token for token in found if token is not None}))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with special tokens only where the tokenizer's own post-processor adds them."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The chat template's text for `messages`, ready for the assistant to go on."""
        if self._template is None:
            raise ValueError(
                f"{self.model_path} has no chat template; give prompts as text, or add chat_template.jinja to the model's directory"
            )
        # Copies: a template must not be able to change the caller's messages.
        copied = [dict(message) for message in messages]
        try:
            return self._template.render(messages=copied, add_generation_prompt=True, **self._special, **variables)
        except Exception as error:  # a program raises what it likes, a TypeError for content that is null, say
            raise ValueError(
                f"the chat template of {self.model_path} refused the messages: {error}; check roles and their order"
            ) from error

    def prompt_ids(self, prompt: str | Sequence[Message], *, apply_chat_template: bool = False) -> list[int]:
        """A dataset row's prompt in tokens. Messages are rendered; text only when asked, as one user message."""
        if isinstance(prompt, str):
            if not apply_chat_template:
                return self.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        # The template has written the special tokens itself.
        return self.encode(self.render(prompt), add_special_tokens=False)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} does not hold a JSON object; copy the checkpoint again")
    return data


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _template_text(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the entry in tokenizer_config.json, which is a text or a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(text: str | None) -> Template | None:
    if text is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"the model's chat template cannot be read: {error}; correct chat_template.jinja") from error


def _to_json(value: Any, **how: Any) -> str:
    """Unlike jinja2's own, without HTML escapes: models were trained on plain JSON."""
    return json.dumps(value, **({"ensure_ascii": False} | how))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for other frameworks' masks. Ours come from what was sampled: just the content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
