"""What the user can correct, as errors of a start that name the setting or the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxctx.engine.runner.check.time_limit import NeverEnds
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from jaxctx.model.config_reader import CheckpointError
from jaxctx_server.errors import MODEL, NEVER_ENDS, StartError


@contextmanager
def user_errors(model: str | Path | None) -> Iterator[None]:
    """Raise StartError for what the user can correct: of this model directory (None: the bundled one), or a setting."""
    try:
        yield
    except CheckpointError as error:
        raise StartError(f"{model or 'the bundled model'}: {error.message}", MODEL) from error
    except (InvalidArgument, FailedPrecondition, AlreadyExists) as error:
        wrong = "; ".join(f"--{each.field.replace('_', '-')}: {each.description}" for each in error.violations)
        raise StartError(wrong or error.message) from error
    except NeverEnds as error:
        raise StartError(f"{error.of}: {error}", NEVER_ENDS) from error
    except OSError as error:
        raise StartError(f"{error.filename or model}: {error.strerror or error}", MODEL) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = "the device's memory is too small for this model and KV: lower --kv-tokens or --memory-fraction"
        raise StartError(message, MODEL) from error
