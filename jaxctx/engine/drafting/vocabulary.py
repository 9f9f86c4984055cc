"""Whether two models mean the same tokens by the same ids, as a draft model and the model that it drafts for must."""

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import Tokenizer


def require_same_vocabulary(served: Tokenizer, draft: Tokenizer, field: str = "draft_model") -> None:
    """Raise InvalidArgument for `field`, naming the first id that differs, unless both have the same entry at every id.

    Entries that were added to a vocabulary count, and so does whether they are special.
    """
    ours, theirs = served.vocabulary(), draft.vocabulary()
    for token in sorted(ours.keys() | theirs.keys()):
        entry, other = ours.get(token), theirs.get(token)
        if entry != other:
            what = f"token {token} is {_quoted(entry)} of the model and {_quoted(other)} of the draft model"
            raise InvalidArgument.field(field, f"another tokenizer: {what}")
    special = min(served.special_ids ^ draft.special_ids, default=None)
    if special is not None:
        whose = "the model" if special in served.special_ids else "the draft model"
        what = f"token {special}, {_quoted(ours[special])}, is special for {whose} alone"
        raise InvalidArgument.field(field, f"another tokenizer: {what}")


def _quoted(entry: str | None) -> str:
    return "none" if entry is None else repr(entry)
