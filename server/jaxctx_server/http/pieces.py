"""Single tokens as bytes and text, and what a server remembers of them."""

from dataclasses import dataclass, field

MAX_MODELS = 8  # of which pieces are kept


@dataclass(frozen=True, slots=True)
class Piece:
    """One token by itself."""

    data: bytes  # UTF-8; of some tokens only a part of a character
    is_special: bool  # it is not in the text of an output
    text: str | None = field(init=False)  # None: it is no whole characters

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", decoded(self.data))

    @property
    def escaped(self) -> str:
        """The text; bytes that are no whole characters as `\\xe2\\x82`."""
        return escaped_bytes(self.data) if self.text is None else self.text


def decoded(data: bytes) -> str | None:
    """The text that bytes are, None if they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def escaped_bytes(data: bytes) -> str:
    """Bytes as `\\xe2\\x82`."""
    return "".join(f"\\x{byte:02x}" for byte in data)


class PieceCache:
    """Pieces of the models that a server serves, by model and revision."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], dict[int, Piece]] = {}

    def of_model(self, model_id: str, revision: str) -> dict[int, Piece]:
        """The pieces that are known of a model, to be added to. Up to one for each token of its vocabulary."""
        found = self._models.get((model_id, revision))
        if found is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            found = self._models[model_id, revision] = {}
        return found
