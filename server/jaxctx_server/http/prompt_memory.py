"""What a server remembers of prompts under the keys that their callers chose: how they began, but no tokens.

A prompt is remembered as digests of its beginnings, one for each page, so that a later prompt can be told how many
whole pages it has in common with the last one of its key. Keys are those of a tenant: nobody else's prompts are
compared with. The memory is bounded, for each tenant and in all: some 16 MiB. What was used longest ago is forgotten
first, and all of it when the process ends.
"""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PROMPTS = 1024  # of all tenants
MAX_PROMPTS_OF_TENANT = 64
MAX_BEGINNINGS = 2048  # of a prompt: of a longer one each spans 2, 4, 8 … pages
DIGEST_BYTES = 8  # keyed: nobody can choose tokens that have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPrompt:
    """One prompt."""

    answer_id: str  # of the answer to it
    model: str  # its id and revision
    salt: bytes  # digests
    tools: bytes
    span: int  # tokens that each beginning has more than the one before it
    beginnings: bytes  # digests of the first `span` tokens, the first 2 * `span`, …

    @property
    def whole_tokens(self) -> int:
        """Tokens of the longest beginning."""
        return len(self.beginnings) // DIGEST_BYTES * self.span

    def beginning(self, tokens: int) -> bytes:
        """The digest of the first `tokens` tokens, a multiple of `span` up to `whole_tokens`."""
        end = tokens // self.span * DIGEST_BYTES
        return self.beginnings[end - DIGEST_BYTES : end]


class PromptMemory:
    """The last prompt of each key. Used on the event loop, but for `digests_of`, which any thread may call."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._prompts: OrderedDict[tuple[str, bytes], RememberedPrompt] = OrderedDict()  # the oldest use first
        self._counts: dict[str, int] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._prompts)

    def replace(self, tenant: str, key: str, prompt: RememberedPrompt) -> RememberedPrompt | None:
        """Remember a prompt as the last one of a key of a tenant. Returns the one before it, if it is known."""
        place = tenant, self.digest_of(key)
        earlier = self._prompts.pop(place, None)
        if earlier is None:
            if self._counts.get(tenant, 0) >= MAX_PROMPTS_OF_TENANT:
                self._forget(next(each for each in self._prompts if each[0] == tenant))
            elif len(self._prompts) >= MAX_PROMPTS:
                self._forget(next(iter(self._prompts)))
            self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._prompts[place] = prompt
        return earlier

    def digest_of(self, text: str) -> bytes:
        """A digest of a text."""
        return hashlib.blake2b(text.encode(errors="surrogatepass"), key=self._secret, digest_size=32).digest()

    def digests_of(self, tokens: Sequence[int], page_size: int) -> tuple[int, bytes]:
        """The span and the digests of the beginnings of a prompt, see `RememberedPrompt`. Some 0.1 µs a token."""
        span = page_size
        while len(tokens) // span > MAX_BEGINNINGS:
            span *= 2
        data = memoryview(array("i", tokens)).cast("B")
        size = array("i").itemsize
        running = hashlib.blake2b(key=self._secret, digest_size=DIGEST_BYTES)
        beginnings = bytearray()
        for start in range(0, len(tokens) // span * span, span):
            running.update(data[start * size : (start + span) * size])
            beginnings += running.copy().digest()
        return span, bytes(beginnings)

    def _forget(self, place: tuple[str, bytes]) -> None:
        del self._prompts[place]
        self._counts[place[0]] -= 1
        if self._counts[place[0]] == 0:
            del self._counts[place[0]]


def common_tokens(a: RememberedPrompt, b: RememberedPrompt) -> int:
    """How many tokens two prompts of one model have in common at the front, in whole spans of the longer one."""
    span = max(a.span, b.span)
    low, high = 0, min(a.whole_tokens, b.whole_tokens) // span
    while low < high:
        middle = (low + high + 1) // 2
        if a.beginning(middle * span) == b.beginning(middle * span):
            low = middle
        else:
            high = middle - 1
    return low * span
