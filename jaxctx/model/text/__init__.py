"""Text: strings to token ids and back, chat messages to a prompt, stop strings. No JAX, no arrays, no model.

`load_text` reads what a checkpoint says about its text; the engine turns sampled ids into text with a `Detokenizer` and
ends it with a `StopMatcher`, one of each per output. Everything comes from the model's directory: nothing is fetched.
"""

from jaxctx.model.text.chat import ChatTemplate
from jaxctx.model.text.load import ModelText, load_text
from jaxctx.model.text.stream import Detokenizer, StopMatcher
from jaxctx.model.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "ModelText", "StopMatcher", "Tokenizer", "load_text"]
