"""The executor: one task on one engine, its prompt into a context and the output out of it.

All that a task appends is tokenised as one text, whatever its parts are, so that it gives the tokens of the whole text;
an output is kept as the tokens that were generated, and what follows it is tokenised by itself. An engine finds by
itself whatever leading pages it has, and of calls that come together one computes what they share while the others
wait. To keep the pages of a template's constant prefix, the context of the first call that is done is not closed: it is
rewound to them, and stays on its engine for all sessions of the tenant. Two other ways were tried. Filling such a
context before the first call made calls with a template of their own wait for one step more (5% of a chain of them).
Calls as forks of it go on from a partial page, behind which nothing is found that they have in common.

The tokens of a call are the truth, and its context only saves time: after the loss of an engine the context is made
anew from them elsewhere. An output that was being generated is resumed there behind the tokens that had come, with the
seed that it began with, so it becomes what it would have become; its text is never tokenised again.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import cast

from jaxctx.engine.interface import PROGRAM_LABELS, Caller, ProgramEngine
from jaxctx.errors import FailedPrecondition, JaxctxError, NotFound, ResourceExhausted
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.programs.tasks import Call, CallContext, Task
from jaxctx.types import (
    ContextInfo,
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
CLOSE_AGAIN_S = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0)  # pauses before a context that could not be closed is again
MAX_TTL_S = 315_576_000.0  # the longest that an engine lets a context live, or a caller a task take
MAX_PREFIXES = 256  # kept on an engine
MAX_TENANT_PREFIXES = 32  # of them, of one tenant: most are contexts, which count for its quota
PLACE_REASONS = ("QUOTA", "TOO_MANY_CONTEXTS")  # of a refused context: it is accepted once another one is closed
URGENT_CRITERIA = (Criterion.TIME_TO_FIRST_TOKEN, Criterion.LATENCY)  # engines begin with tasks of these
URGENT_PRIORITY = 10  # of their contexts


class Executor:
    """Runs tasks, and owns the contexts of their calls."""

    def __init__(self, clock: Callable[[], float], prefix_timeout_s: float = PREFIX_TIMEOUT_S) -> None:
        """`clock` is that of deadlines. Contexts of constant prefixes end `prefix_timeout_s` after their last use; at
        0 they are not kept.
        """
        self._clock = clock
        self._prefix_ttl = Ttl(prefix_timeout_s, sliding=True)
        self._closing: dict[asyncio.Task[None], str] = {}  # contexts that were given up, and whose they are
        # Contexts of engines that did not answer, and who closes them again.
        self._unclosed: dict[ProgramEngine, deque[tuple[Caller, str]]] = {}
        self._closing_again: set[asyncio.Task[None]] = set()

    async def run(self, task: Task, engine: EngineHandle) -> None:
        """Generate the task's output into its variable, which is not set here. Raises the engine's errors."""
        call = task.call
        await self._append_prompt(task, engine, Caller(call.tenant, task.deadline))
        # Tokens of the output that came from engines which were lost since.
        resumed_tokens = len(call.tokens) - task.output_start
        max_tokens = task.spec.output.settings.max_tokens or engine.engine.info.default_max_tokens
        if task.output_complete or resumed_tokens >= max_tokens:
            return
        try:
            caller = Caller(call.tenant, task.deadline)
            context_id = await self._context_with_tokens(task, engine, caller)
            request = self._generate_request(task, context_id, resumed_tokens)
            await self._generate(task, engine, caller, request)
        except BaseException:
            if call.context is not None and call.context.engine is engine:  # else the call runs elsewhere already
                call.tokens_in_context = 0  # nobody knows what the context holds now
                self.release(call)
            raise

    async def _append_prompt(self, task: Task, engine: EngineHandle, caller: Caller) -> None:
        """Tokenise the task's prompt, once, behind the tokens of its call."""
        if task.prompt_appended:
            return
        call = task.call
        prompt = "".join(task.prompt)
        if prompt:
            call.tokens += await engine.encode(caller, prompt, not call.tokens)
        task.prompt_appended = True
        task.output_start = len(call.tokens)

    def _generate_request(self, task: Task, context_id: str, resumed_tokens: int) -> GenerateRequest:
        settings = task.spec.output.settings
        if task.seed is None:
            task.seed = secrets.randbits(63) if settings.sampling.seed is None else settings.sampling.seed
        return GenerateRequest(
            context_id=context_id,
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            sampling=replace(settings.sampling, seed=task.seed),
            stop=settings.stop,
            stop_token_ids=settings.stop_token_ids,
            ignore_eos=settings.ignore_eos,
            include_stop=settings.include_stop,
            resume_tokens=resumed_tokens,
            output_format=settings.output_format,
        )

    async def _generate(self, task: Task, engine: EngineHandle, caller: Caller, request: GenerateRequest) -> None:
        call = task.call
        task.generating = True
        # Every engine's `generate` is an async generator, which the interface states as an iterator.
        pieces = cast(AsyncGenerator[GeneratePiece, None], engine.engine.generate(caller, request))
        async with aclosing(pieces):
            async for piece in pieces:
                task.generating = False
                task.failure_score = 0
                task.refusals = 0
                call.tokens += piece.token_ids
                task.output.append(piece.text)
                task.output_complete = piece.finish is not None
        call.tokens_in_context = len(call.tokens)

    async def _context_with_tokens(self, task: Task, engine: EngineHandle, caller: Caller) -> str:
        """Return the id of a context on this engine that holds, or has buffered, the call's tokens."""
        call = task.call
        if call.context is not None and call.context.engine is not engine:
            self.release(call)
        if call.context is None:
            call.context = await self._create_context(task, engine, caller)
            call.tokens_in_context = 0
        context_id = call.context.context_id
        if call.tokens_in_context < len(call.tokens):
            missing = call.tokens[call.tokens_in_context :]
            await engine.engine.fill(caller, context_id, missing, defer=True)
            call.tokens_in_context = len(call.tokens)
        return context_id

    async def _create_context(self, task: Task, engine: EngineHandle, caller: Caller) -> CallContext:
        call = task.call
        longer_than_the_task_s = min(call.timeout_s + PREFIX_TIMEOUT_S, MAX_TTL_S)
        request = CreateContextRequest(
            context_id=secrets.token_hex(16),
            adapter="" if call.model_id == engine.engine.info.model_id else call.model_id,
            priority=URGENT_PRIORITY if task.criterion in URGENT_CRITERIA else 0,
            ttl=Ttl(longer_than_the_task_s, sliding=True),
            labels=PROGRAM_LABELS,
        )
        try:
            created = await self._create_giving_up_prefixes(engine, caller, request)
        except BaseException:  # the engine may have made it all the same
            self._close_later(CallContext(engine, request.context_id or ""), Caller(call.tenant), prefix="")
            raise
        context = CallContext(engine, created.context_id, created.adapter_revision)
        if call.adapter_revision not in (None, created.adapter_revision):
            self._close_later(context, Caller(call.tenant), prefix="")
            message = f"the call began with other weights than the adapter {call.model_id!r} has now"
            raise FailedPrecondition(message, reason="ADAPTER_MISMATCH")
        call.adapter_revision = created.adapter_revision
        return context

    async def _create_giving_up_prefixes(
        self, engine: EngineHandle, caller: Caller, request: CreateContextRequest
    ) -> ContextInfo:
        """Create a context. While there are too many, kept prefixes of the tenant are given up, oldest first."""
        while True:
            try:
                return await engine.engine.create(caller, request)
            except ResourceExhausted as error:
                kept = [key for key, holder in engine.prefixes.items() if key[0] == caller.tenant and holder]
                if error.reason not in PLACE_REASONS or not kept:
                    raise
                closing = self._give_up_prefix(engine, kept[0])
                if closing is not None:
                    await asyncio.shield(closing)  # else nobody would close it

    def task_ended(self, task: Task) -> None:
        """Give up the call's context unless another task of the call was asked for, and in the end its tokens."""
        task.prompt_blocks = ()
        call = task.call
        if not any(each.phase in (TaskPhase.WAITING, TaskPhase.STARTED) for each in call.tasks):
            self.release(call)
        if all(each.ended for each in call.tasks):
            call.tokens = []

    def release(self, call: Call) -> None:
        """Give up the call's context. It can be made again from the call's tokens."""
        if call.context is not None:
            context, call.context = call.context, None
            prefix = call.prefix if call.tokens_in_context else ""
            self._close_later(context, Caller(call.tenant), prefix)

    async def wait_until_released(self, tenant: str) -> None:
        """Return when all contexts of the tenant that were given up are closed."""
        closing = [task for task, owner in self._closing.items() if owner == tenant]
        if closing:
            await asyncio.wait(closing)

    def _close_later(self, context: CallContext, caller: Caller, prefix: str) -> asyncio.Task[None]:
        closing = asyncio.create_task(self._close_or_keep(context, caller, prefix))
        self._closing[closing] = caller.tenant
        closing.add_done_callback(self._closing.pop)
        return closing

    async def _close_or_keep(self, context: CallContext, caller: Caller, prefix: str) -> None:
        """Close a context, unless it becomes, without any error, the one that holds this constant prefix ("": none)."""
        engine = context.engine
        kept = False
        if prefix and self._prefix_ttl.seconds:
            with suppress(JaxctxError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    kept = await self._keep_for_prefix(context, caller, prefix)
        if kept:
            return
        key = (caller.tenant, context.adapter_revision, prefix)
        if engine.prefixes.get(key) == context.context_id:
            del engine.prefixes[key]
        if not await self._closed(engine.engine, caller, context.context_id):  # nobody waits any longer than that
            self._close_later_again(engine.engine, caller, context.context_id)

    def _close_later_again(self, engine: ProgramEngine, caller: Caller, context_id: str) -> None:
        if engine in self._unclosed:
            self._unclosed[engine].append((caller, context_id))
            return
        self._unclosed[engine] = deque([(caller, context_id)])
        again = asyncio.create_task(self._close_again(engine))
        self._closing_again.add(again)
        again.add_done_callback(self._closing_again.discard)

    async def _close_again(self, engine: ProgramEngine) -> None:
        """Close the contexts of an engine that did not answer: it may be the same one, with all it had, when it does.

        One at a time, as there may be thousands. Later their times to live end them.
        """
        unclosed = self._unclosed[engine]
        try:
            pauses = iter(CLOSE_AGAIN_S)
            while unclosed and (pause_s := next(pauses, None)) is not None:
                count, closed = len(unclosed), 0
                await asyncio.sleep(pause_s)
                while unclosed and await self._closed(engine, *unclosed[0]):
                    unclosed.popleft()
                    closed += 1
                unclosed.rotate(-1)  # so that one which always fails holds up no others
                if closed or len(unclosed) > count - closed:  # it answers; or there are more, with as long a time
                    pauses = iter(CLOSE_AGAIN_S)
        finally:
            del self._unclosed[engine]

    async def _closed(self, engine: ProgramEngine, caller: Caller, context_id: str) -> bool:
        """Close a context, or find it gone. False if the engine does not say so in time, and may later.

        True as well for an engine that refuses to close it, as it would do so again: its time to live ends it.
        """
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await engine.close(caller, context_id)
        except JaxctxError as error:
            return not error.is_retryable
        except TimeoutError:
            return False
        return True

    async def _keep_for_prefix(self, context: CallContext, caller: Caller, prefix: str) -> bool:
        """Make sure that a context holds the constant prefix, and begin its time to live again.

        Returns whether it is `context`, which begins with the prefix and is rewound to its whole pages.
        """
        engine, key = context.engine, (caller.tenant, context.adapter_revision, prefix)
        keep_alive = UpdateContextRequest(ttl=self._prefix_ttl, priority=0)
        holder = engine.prefixes.pop(key, context.context_id)
        engine.prefixes[key] = holder  # the latest used come last
        self._drop_excess_prefixes(engine, caller.tenant)
        if holder == "":
            return False
        if holder != context.context_id:
            try:
                await engine.engine.update(caller, holder, keep_alive)
                return False
            except NotFound:  # it has expired: this context takes its place
                if engine.prefixes.get(key) != holder:
                    return False
                engine.prefixes[key] = context.context_id
        page_size = engine.engine.info.page_size
        prefix_tokens = len(await engine.encode(caller, prefix, True))
        pages = (prefix_tokens - 1) // page_size  # the last token may be another one once text follows it
        if pages == 0:
            engine.prefixes[key] = ""
            return False
        await engine.engine.rewind(caller, context.context_id, pages * page_size)
        await engine.engine.update(caller, context.context_id, keep_alive)
        return True

    def _drop_excess_prefixes(self, engine: EngineHandle, tenant: str) -> None:
        """Give up what this tenant, or all together, have too many of: the longest unused.

        Those that are shorter than a page count too, or one tenant's could take the places of all others'.
        """
        of_tenant = [key for key in engine.prefixes if key[0] == tenant]
        for key in of_tenant[: max(0, len(of_tenant) - MAX_TENANT_PREFIXES)]:
            self._give_up_prefix(engine, key)
        while len(engine.prefixes) > MAX_PREFIXES:
            self._give_up_prefix(engine, next(iter(engine.prefixes)))

    def _give_up_prefix(self, engine: EngineHandle, key: tuple[str, str, str]) -> asyncio.Task[None] | None:
        """Forget a constant prefix; returns the closing of its context, which runs to its end in any case.

        None: it is shorter than a page, and no context holds it.
        """
        tenant, adapter_revision, _ = key
        holder = engine.prefixes.pop(key)
        if holder == "":
            return None
        return self._close_later(CallContext(engine, holder, adapter_revision), Caller(tenant), prefix="")
