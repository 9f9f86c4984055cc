"""Output: how tokens are sampled, their text, and when to stop. One per output of a generation, on the step thread."""

from jaxctx.answers import FinishReason, GeneratePiece, TokenLogprob
from jaxctx.cache.contexts import Context
from jaxctx.engine.interface import GenerateRequest
from jaxctx.engine.passes import Sampler
from jaxctx.model.sampling import Sampled
from jaxctx.model.text import Detokenizer, ModelText, StopMatcher


class Output:
    """Counts tokens, decodes them without breaking a character, watches for stop tokens and stop strings.

    Text that may still become a stop string is held back until it cannot. A stop token's own text is not returned,
    its id is: it joined the context. Stop strings are looked for only in text sampled after `min_tokens`.
    """

    def __init__(
        self, request: GenerateRequest, index: int, context: Context, text: ModelText, seed: int, max_tokens: int
    ) -> None:
        """`max_tokens` is at least 1, whatever the request says."""
        self.request = request
        self.sampler = Sampler(request, seed, first=context.length)
        self.max_tokens = max_tokens
        self._index = index
        self._context_id = context.id
        self.stop_ids = tuple(dict.fromkeys([*request.stop_token_ids, *(() if request.ignore_eos else text.eos_ids)]))
        # The text of some tokenizers depends on the tokens before it.
        self._detokenizer = Detokenizer(text.tokenizer, context.tokens(max(context.length - 8, 0)).tolist())
        self._matcher = StopMatcher(request.stop, include_stop=request.include_stop)
        self.tokens = 0

    def push(self, step: Sampled, row: int) -> GeneratePiece:
        """Take the next token, of one row of a step's samples."""
        self.tokens += 1
        token, may_stop = int(step.tokens[row]), self.tokens > self.request.min_tokens
        finish: FinishReason | None = None
        match: str | int | None = None
        if may_stop and token in self.stop_ids:
            text, finish, match = self._matcher.finish(), FinishReason.STOP, token
            if self.request.include_stop:
                text += self._detokenizer.push([token])
            text += self._detokenizer.finish()
        else:
            text = self._detokenizer.push([token])
            if may_stop:
                text, match = self._matcher.push(text)
            if match is not None:
                finish = FinishReason.STOP
            elif self.tokens == self.max_tokens:
                text, finish = text + self._matcher.finish() + self._detokenizer.finish(), FinishReason.LENGTH
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
