"""One task on one engine: its prompt into a context, and the output out of it.

All that a task appends is tokenised as one text, whatever its parts, so that it gives the tokens of the whole text; an
output is kept as the tokens that were generated, and what follows it is tokenised by itself. An engine finds by itself
whatever leading pages it has, and of calls that come together one computes what they share while the others wait; so
that the pages of the constant prefix of a template stay, the context of the first call that is done is not closed but
goes back to them, and is kept on its engine for all sessions of a tenant. (To fill such a context before the first call
was tried: calls whose template is theirs alone waited for a step more, 5% of a chain of them. Calls as forks of it were
tried: a fork goes on from a partial page, behind which nothing is found that calls have in common beyond the prefix.)

The tokens of a call are the truth, and its context only saves time: after the loss of an engine the context is made
anew from them elsewhere. An output that was being made is resumed there behind the tokens that had come of it, with the
seed that it began with, so that it becomes what it would have become; its text is never tokenised again.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import cast

from jaxctx.engine.interface import PROGRAM_LABELS, Caller
from jaxctx.errors import JaxctxError, NotFound
from jaxctx.programs.calls import Call, Task
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.types import (
    CreateContextRequest,
    Criterion,
    GeneratePiece,
    GenerateRequest,
    TaskPhase,
    Ttl,
    UpdateContextRequest,
)

PREFIX_TIMEOUT_S = 600.0  # after the last use of a constant prefix
CLOSE_TIMEOUT_S = 10.0
LONGEST_S = 315576000.0  # that an engine lets a context live, or a caller a task take
MOST_PREFIXES = 256  # of an engine
FIRST = (Criterion.TIME_TO_FIRST_TOKEN, Criterion.LATENCY)  # engines begin with tasks of these
SOON = 10  # the priority of their contexts


class Execution:
    """Runs tasks, and keeps their contexts."""

    def __init__(self, clock: Callable[[], float], prefix_timeout_s: float = PREFIX_TIMEOUT_S) -> None:
        """`clock` is that of deadlines. Contexts of constant prefixes end so long after their last use; 0: at once."""
        self._clock = clock
        self._ttl = Ttl(prefix_timeout_s, sliding=True)
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, task: Task, node: EngineHandle) -> None:
        """Generate the task's output into its variable, which is not set. Raises the engine's errors."""
        call, output = task.call, task.chain.output
        caller = Caller(call.tenant, task.deadline)
        if not task.appended:
            prompt = "".join(task.prompt)
            call.tokens += await node.encode(prompt, not call.tokens) if prompt else ()
            task.appended, task.began = True, len(call.tokens)
        settings = output.settings
        made = len(call.tokens) - task.began  # tokens of the output that came from engines that were lost since
        if task.finished or made >= (settings.max_tokens or node.engine.info.default_max_tokens):
            return
        try:
            if task.seed is None:
                seed = settings.sampling.seed
                task.seed = secrets.randbits(63) if seed is None else seed
            request = GenerateRequest(
                context_id=await self._context(task, node, caller),
                max_tokens=settings.max_tokens,
                min_tokens=settings.min_tokens,
                sampling=replace(settings.sampling, seed=task.seed),
                stop=settings.stop,
                stop_token_ids=settings.stop_token_ids,
                ignore_eos=settings.ignore_eos,
                include_stop=settings.include_stop,
                resume_tokens=made,
            )
            task.begun = True
            pieces = cast(AsyncGenerator[GeneratePiece, None], node.engine.generate(caller, request))
            async with aclosing(pieces):
                async for piece in pieces:
                    task.begun, task.blame, task.refusals = False, 0, 0
                    call.tokens += piece.token_ids
                    output.variable.grow(piece.text)
                    task.finished = piece.finish is not None
            call.held = len(call.tokens)
        except BaseException:
            if call.home is not None and call.home[0] is node:  # else the call is at work elsewhere already
                call.held = 0  # who knows what the context holds now
                self.release(call)
            raise

    async def _context(self, task: Task, node: EngineHandle, caller: Caller) -> str:
        """A context on this engine that holds the call's tokens."""
        call, engine = task.call, node.engine
        if call.home is not None and call.home[0] is not node:
            self.release(call)
        if call.home is None:
            priority = SOON if task.criterion in FIRST else 0
            ttl = Ttl(min(call.timeout_s + PREFIX_TIMEOUT_S, LONGEST_S), sliding=True)  # longer than a task may take
            chosen = secrets.token_hex(16)
            new = CreateContextRequest(context_id=chosen, priority=priority, ttl=ttl, labels=PROGRAM_LABELS)
            try:
                made = await engine.create(caller, new)
            except BaseException:  # it may be there all the same
                self._give_up(node, Caller(call.tenant), chosen)
                raise
            call.home, call.held = (node, made.context_id), 0
        context_id = call.home[1]
        if call.held < len(call.tokens):
            await engine.fill(caller, context_id, call.tokens[call.held :], defer=True)
            call.held = len(call.tokens)
        return context_id

    def ended(self, task: Task) -> None:
        """Give up the call's context unless another task of it was asked for, and in the end its tokens."""
        task.blocks = ()
        if not any(each.phase in (TaskPhase.WAITING, TaskPhase.STARTED) for each in task.call.tasks):
            self.release(task.call)
        if all(each.ended for each in task.call.tasks):
            task.call.tokens = []

    def release(self, call: Call) -> None:
        """Give up the call's context; it can be made again."""
        if call.home is not None:
            (node, context_id), call.home = call.home, None
            self._give_up(node, Caller(call.tenant), context_id, call.prefix if call.held else "")

    def _give_up(self, node: EngineHandle, caller: Caller, context_id: str, prefix: str = "") -> None:
        closing = asyncio.create_task(self._close(node, caller, context_id, prefix))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def released(self) -> None:
        """Return when all contexts that were given up are closed."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _close(self, node: EngineHandle, caller: Caller, context_id: str, prefix: str) -> None:
        """Close a context, unless it becomes the one of this constant prefix, and nothing of that fails."""
        is_kept, key = False, (caller.tenant, prefix)
        if prefix and self._ttl.seconds:
            with suppress(JaxctxError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    is_kept = await self._keeps(node, caller, context_id, prefix)
        if not is_kept:
            if node.prefixes.get(key) == context_id:
                del node.prefixes[key]
            with suppress(JaxctxError, TimeoutError):  # with its engine everything of it is gone
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await node.engine.close(caller, context_id)

    async def _keeps(self, node: EngineHandle, caller: Caller, context_id: str, prefix: str) -> bool:
        """See that there is a context of a constant prefix, and begin its time to live again: whether it is this one,
        which begins with it.
        """
        key, live_on = (caller.tenant, prefix), UpdateContextRequest(ttl=self._ttl, priority=0)
        kept = node.prefixes[key] = node.prefixes.pop(key, context_id)  # the latest used are remembered
        if len(node.prefixes) > MOST_PREFIXES:  # which end by themselves
            del node.prefixes[next(iter(node.prefixes))]
        if kept == "":
            return False
        if kept != context_id:
            try:
                await node.engine.update(caller, kept, live_on)
                return False
            except NotFound:  # it has expired
                if node.prefixes.get(key) != kept:
                    return False
                node.prefixes[key] = context_id
        size = node.engine.info.page_size
        pages = (len(await node.encode(prefix, True)) - 1) // size  # behind them the tokens may be others in a prompt
        if pages == 0:
            node.prefixes[key] = ""
            return False
        await node.engine.rewind(caller, context_id, pages * size)
        await node.engine.update(caller, context_id, live_on)
        return True
