"""References of an input: items that a client does not send again, but names by their ids.

An item is found in what the response continues, or in the response that made it, which its id names. Clients send a
whole conversation in each request, with references in place of the answers. So the last answer that is referred to is
looked up first: its response has all items before it too, and mostly nothing else has to be read.

An item stands in a conversation once: a reference to one that is already there adds nothing and is left out. So a
request of some kilobytes cannot name one large item thousands of times. Those who send their whole history beside
`previous_response_id` mean what they get so.
"""

from collections.abc import Sequence
from typing import Any

from jaxctx.errors import InvalidArgument, NotFound
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.openai.responses.items import is_reference
from jaxctx_server.http.openai.responses.record import (
    RESPONSE_PREFIX,
    expired,
    has_expired,
    load_conversation,
    not_found,
    response_of_item,
)

Json = dict[str, Any]
MAX_READ = 64  # responses that are read for one request


async def resolved(call: HttpCall, items: Sequence[Json], known_items: Sequence[Json]) -> list[Json]:
    """The items of an input, with what its references name in their place, or without them if that is there before.
    `known_items`: of what is continued.

    Raises NotFound (SNAPSHOT_NOT_FOUND), naming the field, for an item that is not stored, or not for the caller, and
    InvalidArgument if too many responses would have to be read.
    """
    if not any(map(is_reference, items)):
        return list(items)
    known = {item["id"]: item for item in known_items}
    kept = without_repeats(items, there=set(known))
    read = 0
    for place, named in reversed(kept.items()):
        item_id = named["id"]
        if not is_reference(named) or item_id in known:
            continue
        read += 1
        if read > MAX_READ:
            raise InvalidArgument.field("input", f"refers to items of more than {MAX_READ} responses")
        for item in await items_of_response(call, item_id, f"input[{place}].id"):
            known.setdefault(item["id"], item)
        if item_id not in known:
            raise not_found(item_id, f"input[{place}].id", "SNAPSHOT_NOT_FOUND")
    return [known[item["id"]] if is_reference(item) else item for item in kept.values()]


def without_repeats(items: Sequence[Json], there: set[str]) -> dict[int, Json]:
    """The items by their places, without references to one that is `there`, or stands before."""
    kept: dict[int, Json] = {}
    for place, item in enumerate(items):
        if not is_reference(item) or item["id"] not in there:
            kept[place] = item
        there.add(item["id"])
    return kept


async def items_of_response(call: HttpCall, item_id: str, field: str) -> Sequence[Json]:
    """All items of the response whose output has this item, also those before it. Raises NotFound, naming the field."""
    response_id = response_of_item(item_id)
    if response_id is None:
        raise not_found(item_id, field, "SNAPSHOT_NOT_FOUND")
    try:
        return (await load_conversation(call, response_id, field, RESPONSE_PREFIX)).conversation.items
    except NotFound as error:
        if has_expired(call, response_id):
            raise expired(item_id, field, call.frontend.response_ttl_s) from None
        raise not_found(item_id, field, error.reason) from None
