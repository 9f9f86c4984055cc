"""`jaxctx-serve ray`: its arguments, the router's loads, and what it does until a signal."""

from __future__ import annotations

import pytest

from jaxctx_server.config import RayConfig, read_config
from jaxctx_server.deploy.ray.supervisor import check_router, engine_arguments
from jaxctx_server.engine_bounds import EngineBounds
from jaxctx_server.errors import StartError


def ray_config(*argv: str) -> RayConfig:
    config = read_config(["ray", *argv], {}, "jaxctx-serve")
    assert isinstance(config, RayConfig)
    return config


def test_arguments() -> None:
    command = ("--engine-command", "python -m that")
    config = ray_config("--router", "127.0.0.1:1", "--engines", "2:5", *command, "--", "model", "--max-batch", "4")
    assert EngineBounds.parse(config.engines) == EngineBounds(2, 5)
    assert check_router(config)
    assert config.engine_command_words() == ["python", "-m", "that"]
    assert engine_arguments(config) == [
        *("model", "--max-batch", "4"),
        *("--role", "engine", "--router", "127.0.0.1:1"),
    ]


def test_a_router_elsewhere_needs_a_key() -> None:
    with pytest.raises(StartError, match="--cluster-key"):
        check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1"))
    assert not check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1", "--cluster-key", "secret"))


def test_an_argument_that_makes_no_sense() -> None:
    with pytest.raises(StartError, match="--engines: must be LEAST or LEAST:MOST"):
        ray_config("--router", "127.0.0.1:1", "--engines", "0:2")
