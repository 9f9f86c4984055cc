"""Chat templates: messages to one prompt string, by the model's own Jinja template in a sandbox.

What a template may use is what the templates of the Hugging Face hub do use: `raise_exception`, `strftime_now`,
`tojson`, `break` and `continue`, `generation` blocks, the special tokens by name. It cannot reach attributes that
Python hides, change its arguments, or loop over a `range` beyond 100,000; its output is limited. A template that was
written to compute for ever would: it belongs to the model's owner, never to a request.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxctx.errors import InvalidArgument
from jaxctx.model.config import CheckpointError

MAX_CHARACTERS = 8_000_000  # of a rendered prompt
Message = Mapping[str, Any]  # JSON values: at least `role` and `content`
EARLIER: tuple[Message, ...] = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})


class ChatTemplate:
    """A model's template. Threads may share it."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: variables such as `bos_token`. Raises CheckpointError if the template does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        # As models were trained on it; Jinja's own filter escapes for HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
        environment.globals.update(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation.

        The template writes special tokens as text. So does whoever writes the messages: as everywhere in this field,
        "<|im_end|>" in a message ends it.
        Raises InvalidArgument naming `messages` if the template refuses or fails on them.
        """
        pieces, size = [], 0
        try:
            # Templates ask whether `tools` is None, not whether it is there.
            made = self._template.generate(messages=messages, tools=None, add_generation_prompt=add_generation_prompt)
            for piece in made:
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise InvalidArgument.field("messages", f"the prompt is longer than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except InvalidArgument:
            raise
        except Exception as error:  # whatever a template meets in messages it did not expect; its text may quote them
            raise InvalidArgument.field("messages", "the chat template fails on these messages") from error
        return "".join(pieces)

    def render_next(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str | None:
        """What the messages add to a conversation that has begun: none of what a template writes once, at its start
        (a beginning-of-sequence token, a system prompt of its own).

        Found by rendering them after a made-up turn. None if that is refused, or if the template does not write what
        went before as it writes it alone.
        """
        try:
            earlier = self.render(EARLIER, add_generation_prompt=False)
            all_of_it = self.render([*EARLIER, *messages], add_generation_prompt=add_generation_prompt)
        except InvalidArgument:
            return None
        return all_of_it[len(earlier) :] or None if all_of_it.startswith(earlier) else None


def _raise_exception(message: object) -> NoReturn:
    raise InvalidArgument.field("messages", f"refused by the chat template: {str(message)[:300]}")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; for serving, only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable in jinja2's annotations

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
