"""What a checkpoint says about its text, read from the files beside its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jaxctx.model.config import Reader, read_json
from jaxctx.model.text.chat import ChatTemplate
from jaxctx.model.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """Everything about a model's text."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    bos_id: int | None
    eos_ids: tuple[int, ...]  # any of them ends an output


def load_text(path: Path, *, clock: Callable[[], datetime] = datetime.now) -> ModelText:
    """Read `tokenizer.json` and, where they exist, `tokenizer_config.json`, `generation_config.json`, `config.json` and
    `chat_template.jinja` of a model's directory. Raises CheckpointError naming the file and key that is wrong.
    """
    tokenizer = Tokenizer.from_file(path / "tokenizer.json")
    settings, generation, config = (
        Reader(read_json(path / file) if (path / file).is_file() else {}, file)
        for file in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(settings, name)) is not None}
    template = _template(path, settings)

    def ids(kind: str) -> tuple[int, ...]:
        """Of this kind of token ("bos", "eos"), by the first file that names any."""
        declared = generation.token_ids(f"{kind}_token_id") or config.token_ids(f"{kind}_token_id")
        token = special.get(f"{kind}_token")
        found = None if token is None else tokenizer.token_id(token)
        return declared or (() if found is None else (found,))

    return ModelText(
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, special_tokens=special, clock=clock),
        bos_id=next(iter(ids("bos")), None),
        eos_ids=ids("eos"),
    )


def _token_text(settings: Reader, name: str) -> str | None:
    """A special token, written as a string or as an object with `content`."""
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        settings.refuse(name, "must be a string")
    return value


def _template(path: Path, settings: Reader) -> str | None:
    """The file goes before the key, as in transformers; the key may hold one template or a list of named ones, of which
    it is the `default` one, else the first.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in value}
        return named["default"] if "default" in named else next(iter(named.values()))
    except (TypeError, KeyError, AttributeError, StopIteration):
        settings.refuse("chat_template", "must be a string or a list of templates, not an empty one")
