# ruff: noqa: N802 - gRPC names the methods of servicers
"""A fake server: contexts of plain token lists behind real gRPC, with scripted failures."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc

from jaxctx import errors, rpc
from jaxctx.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    context_pb2,
    context_service_pb2,
    context_service_pb2_grpc,
    generation_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    snapshot_pb2,
    snapshot_service_pb2,
    snapshot_service_pb2_grpc,
)

PAGE_SIZE = 4
VOCAB_SIZE = 8  # of the model that forward passes run
pb = context_service_pb2


def log_probabilities(seen: Sequence[int]) -> list[float]:
    """The model of forward passes: the log probability of each token after the tokens that are seen, `[VOCAB_SIZE]`.

    They depend on every seen token and on their order: other tokens have other probabilities.
    """
    logits = [random.Random(f"{list(seen)}{token}").uniform(0, 3) for token in range(VOCAB_SIZE)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def greedy_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that greedy decoding adds to these tokens."""
    sequence = list(tokens)
    for _ in range(count):
        sequence.append(max(range(VOCAB_SIZE), key=log_probabilities(sequence).__getitem__))
    return sequence[len(tokens) :]


def scripted_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """An RPC method that records its request and fails where the test wrote an error for it.

    An error of `fail_before` ends the call before it does anything; one of `fail_after` afterwards, so that only the
    answer is lost. Each error is for one call.
    """
    name = function.__name__

    def enter(fake: FakeService, request: Any, context: grpc.ServicerContext) -> None:
        copy = type(request)()
        copy.CopyFrom(request)
        fake.requests[name].append(copy)
        fake.metadata[name].append(dict(context.invocation_metadata()))
        fake.abort_if_scripted(context, fake.fail_before[name])

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def streamed(fake: FakeService, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            enter(fake, request, context)
            yield from function(fake, request, context)

        return streamed

    @functools.wraps(function)
    def unary(fake: FakeService, request: Any, context: grpc.ServicerContext) -> Any:
        enter(fake, request, context)
        try:
            response = function(fake, request, context)
        except errors.JaxctxError as error:
            fake.abort_if_scripted(context, [error])
        fake.abort_if_scripted(context, fake.fail_after[name])
        return response

    return unary


class FakeService(
    context_service_pb2_grpc.ContextServiceServicer,
    snapshot_service_pb2_grpc.SnapshotServiceServicer,
    model_service_pb2_grpc.ModelServiceServicer,
    admin_service_pb2_grpc.AdminServiceServicer,
    session_service_pb2_grpc.SessionServiceServicer,
):
    """The services and their state. A context is a list of tokens; the token of a character is its code point.

    Every output of Generate is the pieces "ab", "cd" and "ef". A test reads `requests` and `metadata` by the name of
    the method, and writes errors to `fail_before` and `fail_after`.
    """

    def __init__(self) -> None:
        self.ids = itertools.count(1)  # of contexts and sessions whose caller chose none
        self.contexts: dict[str, list[int]] = {}
        self.busy: set[str] = set()  # contexts that an output writes to
        self.committed: dict[str, int] = {}  # tokens in committed pages, by context, where a pass kept pages working
        self.commits: list[list[int]] = []  # the tokens of committed pages after each operation that computes
        self.snapshots: dict[str, list[list[int]]] = {}  # tokens of each version, by name
        self.sessions: dict[str, dict[str, str | None]] = {}  # texts of variables, by session and id
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.metadata: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.fail_before: dict[str, list[errors.JaxctxError]] = defaultdict(list)
        self.fail_after: dict[str, list[errors.JaxctxError]] = defaultdict(list)
        self.stalls = False  # Generate stops after its first response until it is cancelled
        self.release_delay_s = 0.0  # how long a cancelled Generate keeps its context busy
        self.cancelled = threading.Event()  # a Generate or WatchContexts was cancelled
        self.started = threading.Event()  # a Generate began

    def abort_if_scripted(self, context: grpc.ServicerContext, script: list[errors.JaxctxError]) -> None:
        """End the call with the first error of the script, if there is one."""
        if script:
            context.abort_with_status(rpc.to_status(script.pop(0)))

    def context_message(self, context_id: str) -> context_pb2.Context:
        """The context as the API states it. Raises NotFound."""
        if context_id not in self.contexts:
            raise errors.NotFound("no such context")
        length = len(self.contexts[context_id])
        busy = context_id in self.busy
        return context_pb2.Context(
            context_id=context_id,
            model_id="fake",
            state=context_pb2.CONTEXT_STATE_BUSY if busy else context_pb2.CONTEXT_STATE_IDLE,
            seq_len=length,
            committed_pages=self.committed_tokens(context_id) // PAGE_SIZE,
            working_pages=-(-(length - self.committed_tokens(context_id)) // PAGE_SIZE),
            working_tokens=length - self.committed_tokens(context_id),
            page_size=PAGE_SIZE,
            labels={"of": "fake"},
        )

    def committed_tokens(self, context_id: str) -> int:
        """How many tokens of the context are in committed pages."""
        length = len(self.contexts[context_id])
        return min(self.committed.get(context_id, length), length) // PAGE_SIZE * PAGE_SIZE

    def compute(self, context_id: str, tokens: Sequence[int], keep_working: bool = False) -> None:
        """Append tokens. With `keep_working` the pages that they fill are not committed."""
        self.committed.pop(context_id, None)
        if keep_working:
            self.committed[context_id] = len(self.contexts[context_id])
        self.contexts[context_id] += tokens
        self.commits.append(self.contexts[context_id][: self.committed_tokens(context_id)])

    def add_context(self, context_id: str, tokens: list[int]) -> context_pb2.Context:
        """A new context with these tokens. Raises AlreadyExists."""
        if context_id in self.contexts:
            raise errors.AlreadyExists(f"{context_id} is taken")
        self.contexts[context_id] = list(tokens)
        return self.context_message(context_id)

    def new_id(self) -> str:
        """An id where the caller chose none."""
        return f"{next(self.ids):032x}"

    def tokens_of_idle(self, context_id: str) -> list[int]:
        """The context's own list of tokens, for changes. Raises NotFound, and Aborted while an output writes to it."""
        if self.context_message(context_id).state == context_pb2.CONTEXT_STATE_BUSY:
            raise errors.Aborted("another writer holds the context")
        return self.contexts[context_id]

    # --- ContextService

    @scripted_method
    def CreateContext(self, request: Any, context: Any) -> Any:
        return pb.CreateContextResponse(context=self.add_context(request.context_id or self.new_id(), []))

    @scripted_method
    def Fill(self, request: Any, context: Any) -> Any:
        held = self.tokens_of_idle(request.context_id)
        before = len(held)
        self.compute(request.context_id, self.content_tokens(request))
        if before == 0:
            return pb.FillResponse(
                resident=1, restored=2, computed=len(held) - 3, context=self.context_message(request.context_id)
            )
        return pb.FillResponse(computed=len(held) - before, context=self.context_message(request.context_id))

    @staticmethod
    def content_tokens(request: Any) -> list[int]:
        """The tokens of a Fill's or Plan's content. Raises InvalidArgument if there is none."""
        match request.WhichOneof("content"):
            case "text":
                return [ord(c) for c in request.text]
            case "tokens":
                return list(request.tokens.ids)
            case "messages":
                return [ord(c) for message in request.messages.messages for c in message.role + message.content]
        raise errors.InvalidArgument.field("content", "missing")

    @scripted_method
    def Flush(self, request: Any, context: Any) -> Any:
        self.tokens_of_idle(request.context_id)
        return pb.FlushResponse(computed=1, context=self.context_message(request.context_id))

    @scripted_method
    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        n = request.n if request.HasField("n") else 1
        try:
            held = self.tokens_of_idle(request.context_id)
            ids = [request.context_id] if n == 1 else [f"{request.context_id}-fork{i}" for i in range(n)]
            for fork in ids if n > 1 else ():
                self.add_context(fork, held)
        except errors.JaxctxError as error:
            self.abort_if_scripted(context, [error])
        self.busy.update(ids)
        context.add_callback(lambda: self.release_contexts(ids))  # also called when the client goes away
        self.started.set()
        for step, text in enumerate(("ab", "cd", "ef")):
            for i, context_id in enumerate(ids):
                response = pb.GenerateResponse(index=i, context_id=context_id, text=text)
                response.token_ids.extend(ord(c) for c in text)
                if request.logprobs:
                    response.logprobs.add(token_id=97, logprob=-0.5).top.add(token_id=98, logprob=-1.5)
                self.contexts[context_id] += response.token_ids
                if step == 2:
                    self.busy.discard(context_id)
                    self.complete_last_response(response, request, len(held))
                yield response
            while self.stalls and context.is_active():
                time.sleep(0.002)
            if not context.is_active():
                return

    def release_contexts(self, ids: list[str]) -> None:
        """A Generate ended: if it was cancelled, its contexts are idle again after `release_delay_s`."""
        if self.busy.intersection(ids):
            self.cancelled.set()
            threading.Timer(self.release_delay_s, self.busy.difference_update, [ids]).start()

    def complete_last_response(self, response: Any, request: Any, prompt_tokens: int) -> None:
        """Add to an output's last response why it ended, its usage and its context."""
        if request.stop:
            response.finish, response.stop_text = generation_pb2.FINISH_REASON_STOP, request.stop[0]
        elif request.stop_token_ids:
            response.finish, response.stop_token_id = generation_pb2.FINISH_REASON_STOP, request.stop_token_ids[0]
        else:
            response.finish = generation_pb2.FINISH_REASON_LENGTH
        response.seed = request.sampling.seed
        response.usage.prompt_tokens = prompt_tokens
        response.usage.completion_tokens = 6
        response.context.CopyFrom(self.context_message(response.context_id))

    @scripted_method
    def Fork(self, request: Any, context: Any) -> Any:
        held = self.tokens_of_idle(request.context_id)
        ids = request.child_ids or [self.new_id() for _ in range(request.n or 1)]
        return pb.ForkResponse(contexts=[self.add_context(child, held) for child in ids])

    @scripted_method
    def Truncate(self, request: Any, context: Any) -> Any:
        held = self.tokens_of_idle(request.context_id)
        if request.tokens > len(held) - self.committed_tokens(request.context_id):
            raise errors.OutOfRange("that many are not in working pages")
        del held[len(held) - request.tokens :]
        return pb.TruncateResponse(context=self.context_message(request.context_id))

    @scripted_method
    def Rewind(self, request: Any, context: Any) -> Any:
        del self.tokens_of_idle(request.context_id)[request.to :]
        self.committed.pop(request.context_id, None)
        return pb.RewindResponse(context=self.context_message(request.context_id))

    @scripted_method
    def SwitchAdapter(self, request: Any, context: Any) -> Any:
        length = len(self.tokens_of_idle(request.context_id))
        response = pb.SwitchAdapterResponse(context=self.context_message(request.context_id))
        response.context.adapter = request.adapter
        response.context.adapter_spans.add(start=0)
        response.context.adapter_spans.add(start=length, adapter=request.adapter, adapter_revision="content")
        return response

    @scripted_method
    def GetContext(self, request: Any, context: Any) -> Any:
        response = pb.GetContextResponse(context=self.context_message(request.context_id))
        if request.include_pages:
            response.pages.page_ids.extend([7, 9])
            response.pages.refcounts.extend([2, 1])
            response.pages.tiers.extend([context_pb2.TIER_DEVICE, context_pb2.TIER_DISK, 77])
        if request.include_tokens:
            response.tokens.ids.extend(self.contexts[request.context_id])
        if request.include_ancestors:
            response.ancestors.add(context_id="parent", forked_at=3)
        return response

    @scripted_method
    def ListContexts(self, request: Any, context: Any) -> Any:
        ids = sorted(i for i in self.contexts if i > request.page_token)
        shown = ids[: request.limit]
        return pb.ListContextsResponse(
            contexts=[self.context_message(i) for i in shown],
            next_page_token=shown[-1] if len(ids) > len(shown) else "",
        )

    @scripted_method
    def UpdateContext(self, request: Any, context: Any) -> Any:
        return pb.UpdateContextResponse(context=self.context_message(request.context_id))

    @scripted_method
    def Plan(self, request: Any, context: Any) -> Any:
        n = len(self.content_tokens(request))
        return pb.PlanResponse(
            tokens=n, resident=1, restored=1, computed=n - 2, pages_needed=3, pages_available=9, host=1
        )

    @scripted_method
    def ReservePages(self, request: Any, context: Any) -> Any:
        return pb.ReservePagesResponse(context=self.context_message(request.context_id))

    @scripted_method
    def CommitPages(self, request: Any, context: Any) -> Any:
        return pb.CommitPagesResponse(context=self.context_message(request.context_id))

    @scripted_method
    def ReleasePages(self, request: Any, context: Any) -> Any:
        return pb.ReleasePagesResponse(context=self.context_message(request.context_id))

    @scripted_method
    def CloseContext(self, request: Any, context: Any) -> Any:
        self.context_message(request.context_id)
        del self.contexts[request.context_id]
        return pb.CloseContextResponse()

    @scripted_method
    def Forward(self, request: Any, context: Any) -> Any:
        before = len(self.tokens_of_idle(request.context_id))
        self.compute(request.context_id, request.tokens, request.keep_working)
        held = self.contexts[request.context_id]
        response = pb.ForwardResponse(context=self.context_message(request.context_id))
        for output in request.outputs:
            end = before + output.index + 1
            bounds = request.masks[output.index].bounds if request.masks else (0, end)
            seen = [token for i in range(0, len(bounds), 2) for token in held[bounds[i] : bounds[i + 1]]]
            logprobs = log_probabilities(seen)
            best = sorted(range(VOCAB_SIZE), key=lambda token, of=logprobs: -of[token])
            result = response.outputs.add(index=output.index, logprobs=[logprobs[i] for i in output.logprob_ids])
            for token in best[: output.top]:
                result.top.add(token_id=token, logprob=logprobs[token])
            if output.logits:
                result.logits = struct.pack(f"<{VOCAB_SIZE}f", *logprobs)
            if output.entropy:
                result.entropy = -sum(math.exp(each) * each for each in logprobs)
            if output.HasField("sample"):
                result.seed = output.sample.seed
                drawn = random.Random(output.sample.seed).choices(range(VOCAB_SIZE), list(map(math.exp, logprobs)))[0]
                result.token_id = drawn if output.sample.temperature else best[0]
        return response

    @scripted_method
    def Compare(self, request: Any, context: Any) -> Any:
        a, b = self.contexts[request.a], self.contexts[request.b]
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return pb.CompareResponse(common_tokens=common, shared_pages=1, length_a=len(a), length_b=len(b))

    @scripted_method
    def WatchContexts(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        for context_id in sorted(self.contexts):
            yield pb.WatchContextsResponse(
                change=pb.CONTEXT_CHANGE_EXISTS,
                at={"seconds": 60},
                context_id=context_id,
                context=self.context_message(context_id),
            )
        yield pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_EXPIRED, context_id="gone")
        yield pb.WatchContextsResponse(change=99)  # type: ignore[arg-type]  # a number that only a later server knows
        self.abort_if_scripted(context, self.fail_after["WatchContexts"])
        while context.is_active():
            time.sleep(0.002)

    # --- SnapshotService: a version is a list of tokens

    def snapshot_message(self, name: str, number: int = 0) -> snapshot_pb2.Snapshot:
        """A version of a snapshot, from 1; 0 is the latest one. Raises NotFound."""
        versions = self.snapshots.get(name, [])
        number = number or len(versions)
        if not 0 < number <= len(versions):
            raise errors.NotFound("no such snapshot", reason="SNAPSHOT_NOT_FOUND")
        return snapshot_pb2.Snapshot(
            name=name,
            version=number,
            latest=number == len(versions),
            tokens=len(versions[number - 1]),
            size_bytes=2**40,
            created_at={"seconds": 60},
            expiry={"at": {"seconds": 90}, "duration": {"seconds": 30, "nanos": 500_000_000}, "sliding": True},
            labels={"of": "fake"},
        )

    @scripted_method
    def Save(self, request: Any, context: Any) -> Any:
        versions = self.snapshots.setdefault(request.name, [])
        if versions and not request.HasField("overwrite_version"):
            raise errors.AlreadyExists("the name is taken")
        if request.overwrite_version != len(versions):
            raise errors.Aborted("not the latest version", reason="VERSION_MISMATCH")
        versions.append(list(self.tokens_of_idle(request.context_id)))
        return snapshot_service_pb2.SaveResponse(snapshot=self.snapshot_message(request.name))

    def open_snapshot(self, request: Any, version: int) -> dict[str, Any]:
        """Make a context of a snapshot; returns the fields of the response."""
        snapshot = self.snapshot_message(request.name, version)
        context = self.add_context(
            request.context_id or self.new_id(), self.snapshots[request.name][snapshot.version - 1]
        )
        context.snapshot = f"{snapshot.name}@{snapshot.version}"
        context.expiry.CopyFrom(snapshot.expiry)
        return {"resident": 2, "restored": 1, "computed": snapshot.tokens - 3, "context": context}

    @scripted_method
    def Open(self, request: Any, context: Any) -> Any:
        return snapshot_service_pb2.OpenResponse(**self.open_snapshot(request, request.version))

    @scripted_method
    def Take(self, request: Any, context: Any) -> Any:
        response = snapshot_service_pb2.TakeResponse(**self.open_snapshot(request, 0))
        del self.snapshots[request.name]
        return response

    @scripted_method
    def GetSnapshot(self, request: Any, context: Any) -> Any:
        return snapshot_service_pb2.GetSnapshotResponse(snapshot=self.snapshot_message(request.name, request.version))

    @scripted_method
    def ListSnapshots(self, request: Any, context: Any) -> Any:
        names = sorted(n for n in self.snapshots if n.startswith(request.prefix) and n > request.page_token)
        shown = names[: request.limit]
        return snapshot_service_pb2.ListSnapshotsResponse(
            snapshots=map(self.snapshot_message, shown), next_page_token=shown[-1] if len(names) > len(shown) else ""
        )

    @scripted_method
    def ListSnapshotVersions(self, request: Any, context: Any) -> Any:
        number = int(request.page_token or len(self.snapshots[request.name]))  # one at a time
        return snapshot_service_pb2.ListSnapshotVersionsResponse(
            snapshots=[self.snapshot_message(request.name, number)],
            next_page_token=str(number - 1) if number > 1 else "",
        )

    @scripted_method
    def UpdateSnapshot(self, request: Any, context: Any) -> Any:
        return snapshot_service_pb2.UpdateSnapshotResponse(snapshot=self.snapshot_message(request.name))

    @scripted_method
    def DeleteSnapshot(self, request: Any, context: Any) -> Any:
        self.snapshot_message(request.name, request.version)
        versions = len(self.snapshots.pop(request.name))
        return snapshot_service_pb2.DeleteSnapshotResponse(versions_deleted=versions)

    @scripted_method
    def Publish(self, request: Any, context: Any) -> Any:
        return snapshot_service_pb2.PublishResponse(
            publication={"publication_id": "p", "tokens": 4, "created_at": {"seconds": 60}}
        )

    @scripted_method
    def UpdatePublication(self, request: Any, context: Any) -> Any:
        publication = {"publication_id": request.publication_id, "labels": request.labels.labels}
        return snapshot_service_pb2.UpdatePublicationResponse(publication=publication)

    @scripted_method
    def Unpublish(self, request: Any, context: Any) -> Any:
        if request.publication_id != "p":
            raise errors.NotFound("no such publication", reason="PUBLICATION_NOT_FOUND")
        return snapshot_service_pb2.UnpublishResponse()

    @scripted_method
    def ListPublications(self, request: Any, context: Any) -> Any:
        return snapshot_service_pb2.ListPublicationsResponse(publications=[{"publication_id": "p"}])

    # --- ModelService and AdminService

    @scripted_method
    def ListModels(self, request: Any, context: Any) -> Any:
        if not request.page_token:
            return model_service_pb2.ListModelsResponse(
                models=[model_service_pb2.Model(model_id="a", parameters=5)], next_page_token="more"
            )
        return model_service_pb2.ListModelsResponse(models=[model_service_pb2.Model(model_id="b", vocab_size=7)])

    @scripted_method
    def GetModel(self, request: Any, context: Any) -> Any:
        if request.model_id == "none":
            raise errors.NotFound("no such model", reason="MODEL_NOT_FOUND")
        return model_service_pb2.GetModelResponse(model=model_service_pb2.Model(model_id="a", page_size=PAGE_SIZE))

    @scripted_method
    def Tokenize(self, request: Any, context: Any) -> Any:
        return model_service_pb2.TokenizeResponse(tokens=[ord(c) for c in request.text])

    @scripted_method
    def Detokenize(self, request: Any, context: Any) -> Any:
        return model_service_pb2.DetokenizeResponse(text="".join(map(chr, request.tokens)))

    @scripted_method
    def ApplyChatTemplate(self, request: Any, context: Any) -> Any:
        text = "".join(f"<{message.role}>{message.content}" for message in request.messages.messages)
        return model_service_pb2.ApplyChatTemplateResponse(text=text, tokens=[1, 2])

    @scripted_method
    def GetStats(self, request: Any, context: Any) -> Any:
        info = admin_service_pb2.EngineInfo(model_id="fake", mesh={"data": 1, "model": 2})
        stats = [
            admin_service_pb2.EngineStats(pages_total=10, pages_free=4, draining=True),
            admin_service_pb2.EngineStats(pages_total=20, pages_free=5),
        ]
        return admin_service_pb2.GetStatsResponse(
            engines=[admin_service_pb2.Engine(info=info, stats=each) for each in stats]
        )

    @scripted_method
    def Drain(self, request: Any, context: Any) -> Any:
        return admin_service_pb2.DrainResponse()

    @scripted_method
    def ClearCache(self, request: Any, context: Any) -> Any:
        return admin_service_pb2.ClearCacheResponse(pages_dropped=12)

    # --- SessionService: a variable that nobody set gets its id in capitals as its text when a call waits for it

    def session_message(self, session_id: str) -> session_service_pb2.Session:
        """The session as the API states it. Raises NotFound."""
        if session_id not in self.sessions:
            raise errors.NotFound("no such session", reason="SESSION_NOT_FOUND")
        variables = len(self.sessions[session_id])
        return session_service_pb2.Session(session_id=session_id, ttl={"seconds": 90}, variables=variables)

    def variable_message(self, session_id: str, variable_id: str) -> session_service_pb2.Variable:
        """The variable as the API states it. Raises NotFound."""
        self.session_message(session_id)
        if variable_id not in self.sessions[session_id]:
            raise errors.NotFound("no such variable", reason="VARIABLE_NOT_FOUND")
        text = self.sessions[session_id][variable_id]
        unset, is_set = session_service_pb2.VARIABLE_STATE_UNSET, session_service_pb2.VARIABLE_STATE_SET
        state = unset if text is None else is_set
        return session_service_pb2.Variable(variable_id=variable_id, name=variable_id[1:], state=state, text=text)

    @scripted_method
    def CreateSession(self, request: Any, context: Any) -> Any:
        session_id = request.session_id or self.new_id()
        self.sessions[session_id] = {}
        return session_service_pb2.CreateSessionResponse(session=self.session_message(session_id))

    @scripted_method
    def GetSession(self, request: Any, context: Any) -> Any:
        return session_service_pb2.GetSessionResponse(session=self.session_message(request.session_id))

    @scripted_method
    def ListSessions(self, request: Any, context: Any) -> Any:
        ids = sorted(each for each in self.sessions if each > request.page_token)
        shown = ids[: request.limit]
        return session_service_pb2.ListSessionsResponse(
            sessions=map(self.session_message, shown), next_page_token=shown[-1] if len(ids) > len(shown) else ""
        )

    @scripted_method
    def DeleteSession(self, request: Any, context: Any) -> Any:
        self.session_message(request.session_id)
        del self.sessions[request.session_id]
        return session_service_pb2.DeleteSessionResponse()

    @scripted_method
    def CreateVariable(self, request: Any, context: Any) -> Any:
        self.session_message(request.session_id)
        text = request.text if request.HasField("text") else None
        self.sessions[request.session_id][f"v{request.name}"] = text
        variable = self.variable_message(request.session_id, f"v{request.name}")
        return session_service_pb2.CreateVariableResponse(variable=variable)

    @scripted_method
    def GetVariable(self, request: Any, context: Any) -> Any:
        variable = self.variable_message(request.session_id, request.variable_id)
        if request.wait and variable.state != session_service_pb2.VARIABLE_STATE_SET:
            self.sessions[request.session_id][request.variable_id] = request.variable_id.upper()
        variable = self.variable_message(request.session_id, request.variable_id)
        return session_service_pb2.GetVariableResponse(variable=variable)

    @scripted_method
    def SetVariable(self, request: Any, context: Any) -> Any:
        if self.variable_message(request.session_id, request.variable_id).text:
            raise errors.AlreadyExists("it is set")
        self.sessions[request.session_id][request.variable_id] = request.text
        variable = self.variable_message(request.session_id, request.variable_id)
        return session_service_pb2.SetVariableResponse(variable=variable)

    @scripted_method
    def ReadVariable(self, request: Any, context: Any) -> Iterator[Any]:
        for character in self.variable_message(request.session_id, request.variable_id).text:
            yield session_service_pb2.ReadVariableResponse(text=character)

    @scripted_method
    def ListVariables(self, request: Any, context: Any) -> Any:
        self.session_message(request.session_id)
        ids = sorted(each for each in self.sessions[request.session_id] if each > request.page_token)
        shown = ids[: request.limit]
        return session_service_pb2.ListVariablesResponse(
            variables=[self.variable_message(request.session_id, each) for each in shown],
            next_page_token=shown[-1] if len(ids) > len(shown) else "",
        )

    @scripted_method
    def SubmitCall(self, request: Any, context: Any) -> Any:
        self.session_message(request.session_id)
        outputs = [f"v{each.name}" for each in request.parameters if each.HasField("output")]
        self.sessions[request.session_id].update(dict.fromkeys(outputs))
        return session_service_pb2.SubmitCallResponse(
            call_id="c1", outputs=[self.variable_message(request.session_id, each) for each in outputs]
        )

    @scripted_method
    def CancelCall(self, request: Any, context: Any) -> Any:
        if request.call_id != "c1":
            raise errors.NotFound("no such call", reason="CALL_NOT_FOUND")
        return session_service_pb2.CancelCallResponse()

    @scripted_method
    def GetGraph(self, request: Any, context: Any) -> Any:
        self.session_message(request.session_id)
        task = session_service_pb2.GraphTask(
            call_id="c1", output="vo", inputs=["vi"], phase=session_service_pb2.TASK_PHASE_DONE, engine_id="local"
        )
        return session_service_pb2.GetGraphResponse(tasks=[task])


class FakeServer:
    """A running gRPC server of a fake service: `fake` is the service, `target` its address."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ServerCredentials | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """`options` are those of gRPC."""
        self.fake = FakeService()
        self.server = grpc.server(futures.ThreadPoolExecutor(16), options=options)
        context_service_pb2_grpc.add_ContextServiceServicer_to_server(self.fake, self.server)
        snapshot_service_pb2_grpc.add_SnapshotServiceServicer_to_server(self.fake, self.server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(self.fake, self.server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self.fake, self.server)
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(self.fake, self.server)
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        self.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self.server.start()
