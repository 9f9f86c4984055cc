"""Where adapters come from: the directories in one directory that whoever runs the server chose."""

from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.model.functional import DecoderModel


@dataclass(frozen=True, slots=True)
class LocalAdapters:
    """The model that adapters are for, and the directory that has theirs; None: none are loaded while it runs."""

    model: DecoderModel
    mesh: Mesh | None
    directory: Path | None

    def find(self, name: str) -> Path:
        """The directory of this name. A caller's name is compared with what is there, and never made a path.

        Raises FailedPrecondition (NO_ADAPTERS) without a directory, NotFound (ADAPTER_NOT_FOUND).
        """
        if self.directory is None:
            message = "this server has no directory to load adapters from: see --adapter-dir"
            raise FailedPrecondition(message, reason="NO_ADAPTERS")
        for entry in self.directory.iterdir():
            if entry.name == name and entry.is_dir():
                return entry
        raise NotFound(f"no directory {name!r} in the server's --adapter-dir", reason="ADAPTER_NOT_FOUND")
