"""Output: how tokens are sampled, their text, and when to stop. One per output of a generation, on the step thread."""

from collections.abc import Sequence

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.forward_pass import Sampler
from jaxctx.engine.grammar.compiler import PreparedMatcher
from jaxctx.errors import FailedPrecondition
from jaxctx.model.sampling import Sampled
from jaxctx.model.text import Detokenizer, ModelText, StopMatcher
from jaxctx.types import FinishReason, GeneratePiece, GenerateRequest, TokenLogprob

PRIMING_TOKENS = 8  # before an output: the text of some tokenizers depends on the tokens before it


class OutputText:
    """Decodes an output's tokens without breaking a character, and watches for stop tokens and stop strings.

    Text that may still become a stop string is held back until it cannot. A stop token's own text is not returned.
    Stop strings are looked for only in text sampled after `min_tokens`.

    An output that is resumed has tokens from the start. They are taken one by one, as when they were drawn, so that
    what was held back then is held back now; the text that they gave went out with them. That takes some microseconds a
    token: make it on a thread of its own.
    """

    def __init__(
        self, request: GenerateRequest, text: ModelText, before: Sequence[int], resumed: Sequence[int] = ()
    ) -> None:
        """`before`: the tokens before the output, or the last `PRIMING_TOKENS` of them. `resumed`: those that it has.

        Raises FailedPrecondition if these end the output.
        """
        # Of an output with a format, also ignored ones: they come only where nothing else can follow.
        self._always_ends = () if request.output_format is None else text.eos_ids
        eos_ids = text.eos_ids if self._always_ends or not request.ignore_eos else ()
        self.stop_ids = tuple(dict.fromkeys([*request.stop_token_ids, *eos_ids]))
        self.resumed = tuple(resumed)
        self.tokens = 0
        self._request = request
        self._detokenizer = Detokenizer(text.tokenizer, before, include_special_tokens=request.include_special_tokens)
        self._matcher = StopMatcher(request.stop, include_stop=request.include_stop)
        for token in resumed:
            _, finish, _ = self.take(token)
            if finish is not None:
                raise FailedPrecondition("the output to resume ends within the tokens that it has")

    def take(self, token: int, *, is_last: bool = False) -> tuple[str, FinishReason | None, str | int | None]:
        """The next token: the text that has become certain, whether the output ends, and the stop that ends it.

        `is_last`: it ends the output if no stop does.
        """
        self.tokens += 1
        may_stop = self.tokens > self._request.min_tokens
        if (may_stop and token in self.stop_ids) or token in self._always_ends:
            text = self._matcher.finish()
            if self._request.include_stop:
                text += self._detokenizer.push([token])
            return text + self._detokenizer.finish(), FinishReason.STOP, token
        text, match = self._detokenizer.push([token]), None
        if may_stop:
            text, match = self._matcher.push(text)
        if match is not None:
            return text, FinishReason.STOP, match
        if is_last:
            return text + self._matcher.finish() + self._detokenizer.finish(), FinishReason.LENGTH, None
        return text, None, None


class Output:
    """One output of a generation: its sampler, its text, how many tokens it has and may have."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        context: Context,
        text: OutputText,
        seed: int,
        max_tokens: int,
        prepared: PreparedMatcher | None = None,
    ) -> None:
        """`max_tokens` is above the number of tokens that `text` has, which are the context's last ones.

        `prepared` says which tokens may come next. If it has a matcher, that has taken these tokens.
        """
        self.request = request
        self.matcher = None if prepared is None else prepared.matcher
        self.next_mask = None if prepared is None else prepared.mask  # None: any token, or a matcher computes it
        first = context.length - text.tokens
        self.sampler = Sampler(request, seed, first, constrained=prepared is not None)
        self.max_tokens = max_tokens
        self._index = index
        self._context_id = context.id
        self._text = text

    @property
    def awaits_mask(self) -> bool:
        """Whether it is not known yet which tokens may come next."""
        return self.matcher is not None and self.next_mask is None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end it."""
        return self._text.stop_ids

    @property
    def tokens(self) -> int:
        """Tokens that it has, those from before it was resumed included."""
        return self._text.tokens

    def push(self, step: Sampled, row: int) -> GeneratePiece:
        """Take the next token, of one row of a step's samples."""
        token = int(step.tokens[row])
        text, finish, match = self._text.take(token, is_last=self.tokens + 1 == self.max_tokens)
        return GeneratePiece(
            index=self._index,
            context_id=self._context_id,
            text=text,
            token_ids=(token,),
            logprobs=(self._logprob(step, row),) if self.request.logprobs else (),
            finish=finish,
            stop_match=match,
        )

    def _logprob(self, step: Sampled, row: int) -> TokenLogprob:
        places = range(self.request.top_logprobs)
        top = [(int(step.top_ids[row, place]), float(step.top_logprobs[row, place])) for place in places]
        return TokenLogprob(token_id=int(step.tokens[row]), logprob=float(step.logprobs[row]), top=top)
