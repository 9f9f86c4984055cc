from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from jaxctx.engine.drafting.vocabulary import require_same_vocabulary
from jaxctx.errors import InvalidArgument
from jaxctx.model.text import Tokenizer
from tests.echo import echo_text


def changed(change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """Echo's tokenizer with a change of what its file says."""
    content = json.loads(echo_text().tokenizer.to_json())
    change(content)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


def swap(content: dict[str, Any]) -> None:
    """As many entries, all the same ones, two of them in each other's place."""
    vocabulary = content["model"]["vocab"]
    vocabulary["et"], vocabulary["ea"] = vocabulary["ea"], vocabulary["et"]


def add(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "<|extra|>"})


def make_plain(content: dict[str, Any]) -> None:
    content["added_tokens"][2]["special"] = False


def test_equal_ones_are_equal() -> None:
    require_same_vocabulary(echo_text().tokenizer, changed(lambda content: None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, r"token \d+ is '\w\w' of the model and '\w\w' of the draft model"),
        (add, r"token 512 is none of the model and '<\|extra\|>' of the draft model"),
        (make_plain, r"token 258, '<\|im_start\|>', is special for the model alone"),
    ],
)
def test_others_are_refused_by_their_first_difference(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"another tokenizer: {message}") as raised:
        require_same_vocabulary(echo_text().tokenizer, changed(change))
    assert [each.field for each in raised.value.violations] == ["draft_model"]


def test_what_only_the_larger_model_has_a_row_for_does_not_count() -> None:
    """As the token of an image, which the smallest Gemma 3 has no row for."""
    served = echo_text().tokenizer
    for one, other in [(served, changed(add)), (changed(add), served)]:
        require_same_vocabulary(one, other, 512)
        with pytest.raises(InvalidArgument, match="token 512"):
            require_same_vocabulary(one, other, 513)
    with pytest.raises(InvalidArgument, match=r"token 258, .* is special for the model alone"):
        require_same_vocabulary(served, changed(make_plain), 512)
    require_same_vocabulary(served, changed(make_plain), 258)
