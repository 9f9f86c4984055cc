"""The manifest for Kubernetes: its arguments are settings of the server, and its parts find each other."""

from importlib.resources import files
from typing import Any

import pytest
import yaml

from jaxctx_server.cli import main
from jaxctx_server.config import ServeConfig, read_config
from jaxctx_server.grpc.server import SERVICES

MANIFEST = files("jaxctx_server.deploy").joinpath("kubernetes.yaml").read_text("utf-8")
PARTS: list[Any] = list(yaml.safe_load_all(MANIFEST))
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in PARTS if "template" in each["spec"]}


@pytest.mark.parametrize(("name", "role"), [("jaxctx-router", "router"), ("jaxctx-engine", "engine")])
def test_a_pod_starts_the_server(name: str, role: str) -> None:
    pod = PODS[name]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["jaxctx-serve"]
    config = read_config(container["args"], {}, "jaxctx-serve")
    assert isinstance(config, ServeConfig)
    assert config.role == role
    assert config.cluster_key is not None
    assert (config.keys is not None) == (role == "router")  # or nobody could call it
    http_ports = [{"containerPort": config.http_port_or_default}] if config.serves_http else []
    assert container["ports"] == [{"containerPort": config.grpc_port}, *http_ports]
    assert pod["terminationGracePeriodSeconds"] > config.drain_timeout_s
    probes = [
        container[each]["grpc"] for each in ("startupProbe", "livenessProbe", "readinessProbe") if each in container
    ]
    assert {each["port"] for each in probes} == {config.grpc_port}
    assert {each.get("service", SERVICES[0]) for each in probes} <= {*SERVICES}


def test_the_parts_find_each_other() -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in PARTS if each["kind"] == "Service"}
    for name, spec in services.items():
        assert spec["selector"].items() <= PODS[name]["metadata"]["labels"].items()
    config = read_config(PODS["jaxctx-engine"]["spec"]["containers"][0]["args"], {}, "jaxctx-serve")
    assert isinstance(config, ServeConfig)
    host, _, port = str(config.router).partition(":")
    assert int(port) in [each["port"] for each in services[host]["ports"]]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes"], {}) == 0
    assert capsys.readouterr().out == MANIFEST
