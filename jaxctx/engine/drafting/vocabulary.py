"""Whether two models mean the same tokens by the same ids, as a draft model and the model that it drafts for must."""

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import Tokenizer


def require_same_vocabulary(
    served: Tokenizer, draft: Tokenizer, rows: int | None = None, field: str = "draft_model"
) -> None:
    """Raise InvalidArgument for `field`, naming the first id that differs, unless both have the same entry at every id.

    Entries that were added to a vocabulary count, and so does whether they are special. `rows`: of the smaller
    embedding; what only the other model knows (the token of an image, of Gemma 3) does not count. None: all ids do.
    """
    ours, theirs = served.vocabulary(), draft.vocabulary()
    both = [token for token in ours.keys() | theirs.keys() if rows is None or token < rows]
    for token in sorted(both):
        entry, other = ours.get(token), theirs.get(token)
        if entry != other:
            what = f"token {token} is {_quoted(entry)} of the model and {_quoted(other)} of the draft model"
            raise InvalidArgument.field(field, f"another tokenizer: {what}")
    special = min((served.special_ids ^ draft.special_ids).intersection(both), default=None)
    if special is not None:
        whose = "the model" if special in served.special_ids else "the draft model"
        what = f"token {special}, {_quoted(ours[special])}, is special for {whose} alone"
        raise InvalidArgument.field(field, f"another tokenizer: {what}")


def _quoted(entry: str | None) -> str:
    return "none" if entry is None else repr(entry)
