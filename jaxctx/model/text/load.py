"""Loads the text side of a checkpoint (tokenizer, chat template, special tokens) from the files beside its weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenizers import AddedToken

from jaxctx.model.config_reader import CheckpointError, Reader, read_json
from jaxctx.model.registry import from_hf
from jaxctx.model.text.chat import ChatTemplate
from jaxctx.model.text.llama_class import has_llama_class, use_llama_class, with_class_names
from jaxctx.model.text.sandbox import TooMuchWork
from jaxctx.model.text.special import NAMES, add_tokens, named_tokens, without_tokens_beyond
from jaxctx.model.text.tokenizer import Tokenizer, read_backend
from jaxctx.model.text.tool_calls import ReasoningFormat, ToolCallFormat, reasoning_format, tool_call_format

FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TEMPLATE_DIRECTORY = "additional_chat_templates"  # of templates beside the default one
TEMPLATE_BYTES = 1 << 20  # the longest published chat template takes 20 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """Everything about a model's text."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    bos_id: int | None
    eos_ids: tuple[int, ...]  # any of them ends an output
    tool_call_format: ToolCallFormat | None = None  # in which the model writes calls of tools; None: not known
    reasoning_format: ReasoningFormat | None = None  # in which it writes its thoughts
    vocab_size: int | None = None  # ids that the model has rows for; None: there is no config.json of a model
    config_json: str = "{}"
    """`tokenizer_config.json` of the directory, with the chat template that is used as `chat_template`."""

    def special_markers(self) -> dict[str, int]:
        """Marks of the two formats that are special tokens, with their ids: an output's text leaves them out unless it
        is asked to include special tokens.
        """
        markers: list[str] = []
        for each in (self.tool_call_format, self.reasoning_format):
            markers += each.markers if each is not None else ()
        ids = {marker: self.tokenizer.token_id(marker) for marker in markers}
        return {marker: token for marker, token in ids.items() if token in self.tokenizer.special_ids}


def load_text(path: Path, *, clock: Callable[[], datetime] = datetime.now) -> ModelText:
    """Read `tokenizer.json` and, where they exist, `tokenizer_config.json`, `generation_config.json`, `config.json`,
    `chat_template.jinja`, further named templates and the older files of special tokens of a model's directory.

    Raises CheckpointError naming the file and key that is wrong.
    """
    backend = read_backend(path / "tokenizer.json")
    settings, generation, config, older, oldest = (
        Reader(read_json(path / file) if (path / file).exists() else {}, file) for file in FILES
    )
    if has_llama_class(backend, settings, config):
        settings = Reader(with_class_names(settings.raw), settings.file)
        use_llama_class(backend, settings)
    if settings.get("split_special_tokens"):
        settings.refuse("split_special_tokens", "not supported: the text of a special token stands for that token")
    if settings.get("added_tokens_decoder") is not None:
        older, oldest = Reader({}, older.file), Reader({}, oldest.file)
    shape = from_hf(config.raw) if config.get("architectures") is not None else None  # else nothing that is served
    named = named_tokens(settings, older)
    add_tokens(backend, named, settings, older, oldest, vocab_size=None if shape is None else shape.vocab_size)
    if shape is not None:
        backend = without_tokens_beyond(backend, shape.vocab_size, keep=_ends(named))
    tokenizer = Tokenizer(backend)
    if shape is not None:
        _check_fits(tokenizer, shape.vocab_size)
    special = {name: token.content for name, token in named.items() if name in NAMES}
    templates = _templates(path, settings)
    source = templates.get("default", next(iter(templates.values()), None))
    tools_source = templates.get("tool_use", source)  # which transformers takes for conversations with tools
    calls = tool_call_format(tools_source, None if shape is None else shape.architecture)
    template = None
    if source is not None:
        template = ChatTemplate(
            source, tools_source=tools_source, tool_calls=calls, special_tokens=special, clock=clock
        )
    bos_ids = _declared_ids("bos", generation, config) or _special_ids(tokenizer, special.get("bos_token"))
    eos_ids = _declared_ids("eos", generation, config) or _special_ids(tokenizer, special.get("eos_token"))
    if shape is not None:  # the defaults of the model family
        bos_ids = bos_ids or (() if shape.bos_token_id is None else (shape.bos_token_id,))
        eos_ids = eos_ids or tuple(shape.eos_token_ids)
    for end in () if calls is None else calls.ends:
        eos_ids += tuple(token for token in _special_ids(tokenizer, end) if token not in eos_ids)
    return ModelText(
        tokenizer=tokenizer,
        chat_template=template,
        bos_id=next(iter(bos_ids), None),
        eos_ids=eos_ids,
        vocab_size=None if shape is None else shape.vocab_size,
        config_json=json.dumps({**settings.raw, "chat_template": source}),
        tool_call_format=calls,
        reasoning_format=reasoning_format(source, _answer_opening(template)),
    )


def _answer_opening(template: ChatTemplate | None) -> str | None:
    """What the template writes before an answer; None if that is not known."""
    try:
        frame = None if template is None else template.frame
    except TooMuchWork:
        return None
    return None if frame is None else frame.opening


def _declared_ids(kind: str, generation: Reader, config: Reader) -> tuple[int, ...]:
    """Ids of this kind of token ("bos", "eos") from the first file that declares any; empty if none does."""
    return generation.token_ids(f"{kind}_token_id") or config.token_ids(f"{kind}_token_id")


def _special_ids(tokenizer: Tokenizer, token: str | None) -> tuple[int, ...]:
    """The id of a special token; empty if there is no such token."""
    found = None if token is None else tokenizer.token_id(token)
    return () if found is None else (found,)


def _ends(named: Mapping[str, AddedToken]) -> set[str]:
    """The tokens that begin and end a sequence, which a model has to have."""
    return {token.content for name, token in named.items() if name in ("bos_token", "eos_token")}


def _check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises CheckpointError for an entry that the model has no row for, or an id that the post-processor inserts.

    The other way round many models have more.
    """
    largest, entry = tokenizer.largest_id()
    if largest >= vocab_size:
        why = f"{entry[:80]!r} has id {largest}, but config.json: vocab_size is {vocab_size}"
        raise CheckpointError(f"tokenizer.json: larger than the model's vocabulary: {why}")
    inserted = max(tokenizer.encode(""), default=0)
    if inserted >= vocab_size:
        why = f"inserts id {inserted}, but config.json: vocab_size is {vocab_size}"
        raise CheckpointError(f"tokenizer.json: post_processor: {why}")


def _templates(path: Path, settings: Reader) -> dict[str, str]:
    """Templates by their names. Files go before the key, as in transformers; the key may hold one template, which is
    the `default` one, or a list of named ones.
    """
    named: dict[str, str] = {}
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            named[name] = _template_text(file)
    if named:
        return named
    value = settings.get("chat_template")
    if len(str(value)) > TEMPLATE_BYTES:
        settings.refuse("chat_template", f"more than {TEMPLATE_BYTES:,} characters")
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError, AttributeError):
        named = {}
    if not named:
        settings.refuse("chat_template", "must be a string or a list of templates, not an empty one")
    return named


def _template_text(file: Path) -> str:
    if (size := file.stat().st_size) > TEMPLATE_BYTES:
        raise CheckpointError(f"{file.name}: {size:,} bytes, more than {TEMPLATE_BYTES:,}")
    try:
        return file.read_text("utf-8")
    except ValueError as error:
        raise CheckpointError(f"{file.name}: not UTF-8: {error}") from error
