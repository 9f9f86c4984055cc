"""MaskWorker: takes sampled tokens into their matchers, and computes what may come next, beside the steps.

That takes 20 µs to some milliseconds for each output. Outputs of one tenant follow each other on a thread, so that
those of others do not wait for a grammar that takes long.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int32

from jaxctx.engine.grammar.matcher import OutputMatcher
from jaxctx.engine.grammar.tenant_threads import TenantThreads
from jaxctx.errors import Internal, JaxctxError

log = logging.getLogger("jaxctx.engine")
THREADS = 4


@dataclass(frozen=True, slots=True)
class MatcherStep:
    """A sampled token, and the matcher of its output."""

    matcher: OutputMatcher
    token: int


NextMask = Int32[np.ndarray, " words"] | JaxctxError
"""What may come next, see `OutputMatcher.mask`; or why this output must end."""


class MaskWorker:
    """See the module docstring. Called on the step thread."""

    def __init__(self) -> None:
        self._threads = TenantThreads(THREADS, "jaxctx-masks")

    def submit(self, tenant: str, steps: Sequence[MatcherStep], done: Callable[[Sequence[NextMask]], object]) -> None:
        """Take tokens of one tenant's outputs. `done` gets the masks in the same order, on a thread of this worker."""
        self._threads.submit(tenant, partial(_advance_all, steps, done))

    def close(self) -> None:
        """Take nothing more."""
        self._threads.close()


def _advance_all(steps: Sequence[MatcherStep], done: Callable[[Sequence[NextMask]], object]) -> None:
    done([_advance(step) for step in steps])


def _advance(step: MatcherStep) -> NextMask:
    try:
        step.matcher.take(step.token)
        return step.matcher.mask()
    except JaxctxError as error:
        return error
    except BaseException:  # a panic of the library is not even an Exception
        log.exception("a matcher failed")
        return Internal("output_format: this output failed inside the server")
