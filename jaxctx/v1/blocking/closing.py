# Generated from jaxctx/client/closing.py by scripts/stubs. Not edited by hand.
"""What is closed when its `with` block is left."""

from abc import ABC, abstractmethod
from typing import Self

from jaxctx.errors import JaxctxError


class Closing(ABC):
    """To be closed by hand, or by leaving its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it is of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise
