"""The events of a response that was made in the background and has ended, once more: out of what is stored of it.

They are the same events with the same numbers as when it was made: the document has the items of the output, and the
lengths of the deltas in which each of them came.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxctx_server.http.events import typed_event
from jaxctx_server.http.openai.responses.event_log import EventLog
from jaxctx_server.http.openai.responses.output import OutputBuilder

Json = dict[str, Any]
BEGUN: Json = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None, "completed_at": None}
"""Fields of a response that has begun."""


def begun_as(resource: Json, status: str) -> Json:
    """A response as it was when it had begun."""
    return resource | BEGUN | {"status": status, "error": None}


def beginning(resource: Json) -> list[Json]:
    """The first events of a response in the background."""
    queued = begun_as(resource, "queued")
    return [{"type": "response.created", "response": queued}, {"type": "response.queued", "response": queued}]


def in_progress(resource: Json) -> Json:
    """The event that comes with the first part of the output."""
    return {"type": "response.in_progress", "response": begun_as(resource, "in_progress")}


def ending(resource: Json) -> Json:
    """The last event of a response that has ended. The API has none for one that was cancelled: its status says so."""
    status = resource["status"]
    return {"type": f"response.{'incomplete' if status == 'cancelled' else status}", "response": resource}


@dataclass(frozen=True, slots=True)
class Deltas:
    """How the output of a response was cut into deltas, by item: see `EventLog`."""

    lengths: list[list[int]]
    logprob_counts: list[list[int]]

    @classmethod
    def of(cls, log: EventLog) -> "Deltas":
        """Those of the events until now."""
        return cls(log.deltas, log.logprob_counts)

    def document(self) -> Json:
        """This as a part of the document."""
        return {"delta_lengths": self.lengths, "delta_logprobs": self.logprob_counts}

    @classmethod
    def read(cls, document: Json) -> "Deltas":
        """Those of a document; none of one that has none."""
        return cls(document.get("delta_lengths", []), document.get("delta_logprobs", []))


def is_deltas(document: Json) -> bool:
    """Whether what a document says of deltas could be read: a caller can save any."""
    return all(
        isinstance(lists := document.get(name, []), list)
        and all(isinstance(each, list) and all(type(count) is int and count >= 0 for count in each) for each in lists)
        for name in ("delta_lengths", "delta_logprobs")
    )


def has_output(resource: Json) -> bool:
    """Whether a stored response has an output whose events can be made: a caller can save any document."""
    output = resource.get("output")
    return isinstance(output, list) and isinstance(resource.get("status"), str) and all(map(is_output_item, output))


def is_output_item(item: Any) -> bool:
    """Whether this is an item as `OutputBuilder` makes it."""
    if not (isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("id", "type", "status"))):
        return False
    if item["type"] == "function_call":
        has_texts = all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments"))
        return has_texts and isinstance(item.get("namespace"), str | None)
    content = item.get("content")
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) and isinstance(part.get("logprobs", []), list)
        for part in content
    )


def numbered_replay(resource: Json, deltas: Deltas, last_number: int, starting_after: int) -> Iterator[str]:
    """The events behind a number as server-sent events. The last one has at least the number `last_number`: of a
    response that was not completed, the events between are not known any more.
    """
    number = 0
    for event in replay(resource, deltas):
        if number > starting_after:
            yield typed_event(event["type"], {**event, "sequence_number": number})
        number += 1
    number = max(number, last_number)
    if number > starting_after:
        event = ending(resource)
        yield typed_event(event["type"], {**event, "sequence_number": number})


def replay(resource: Json, deltas: Deltas) -> Iterator[Json]:
    """The events of a response but the last one."""
    yield from beginning(resource)
    if resource["status"] not in ("completed", "incomplete"):
        return
    yield in_progress(resource)
    ids = iter(item["id"] for item in resource["output"])
    builder = OutputBuilder(lambda prefix: next(ids))
    for place, item in enumerate(resource["output"]):
        lengths = deltas.lengths[place] if place < len(deltas.lengths) else []
        counts = deltas.logprob_counts[place] if place < len(deltas.logprob_counts) else []
        yield from item_events(builder, item, lengths, counts)


def item_events(builder: OutputBuilder, item: Json, lengths: list[int], counts: list[int]) -> Iterator[Json]:
    """The events of one item of the output."""
    match item["type"]:
        case "function_call":
            yield from builder.start_call(item["call_id"], item["name"], item.get("namespace"))
            for fragment in cut(item["arguments"], lengths):
                yield from builder.call_arguments(fragment)
        case kind:
            part = item["content"][0] if item["content"] else {"text": ""}
            yield from builder.start_text("reasoning_text" if kind == "reasoning" else "output_text")
            logprobs = cut(part.get("logprobs", []), counts)
            for text, told in zip(cut(part["text"], lengths), logprobs, strict=False):
                yield from builder.reasoning(text) if kind == "reasoning" else builder.text(text, told)
    yield from builder.close(item["status"])


def cut(whole: Any, lengths: Iterable[int]) -> Iterator[Any]:
    """Pieces of a text or a list, one after the other, of these lengths."""
    start = 0
    for length in lengths:
        yield whole[start : start + length]
        start += length
