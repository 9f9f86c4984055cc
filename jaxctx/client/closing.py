"""What is closed when its `async with` block is left."""

from abc import ABC, abstractmethod
from typing import Self

from jaxctx.errors import JaxctxError


class Closing(ABC):
    """To be closed by hand, or by leaving its `async with` block."""

    @abstractmethod
    async def close(self) -> None:
        """Give up what it is of."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except JaxctxError:
            if error is None:  # else the error of the block is the one to see
                raise
