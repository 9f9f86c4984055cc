"""Every RPC of the contract is one explicit method of a servicer, a Protocol, and each of its implementations."""

import inspect
import re
from typing import Any

import pytest

from jaxctx.rpc import SERVICES
from jaxctx_server.grpc.admin_service import AdminServicer
from jaxctx_server.grpc.context_service import ContextServicer
from jaxctx_server.grpc.engine_service import EngineServicer
from jaxctx_server.grpc.model_service import ModelServicer
from jaxctx_server.grpc.session_service import SessionServicer
from jaxctx_server.grpc.snapshot_service import SnapshotServicer
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.router.context_service import RouterContextService
from jaxctx_server.router.model_service import RouterModelService
from jaxctx_server.router.registration import EngineRegistration
from jaxctx_server.router.snapshot_service import RouterSnapshotService
from jaxctx_server.service.admin import LocalAdminService
from jaxctx_server.service.contexts import LocalContextService
from jaxctx_server.service.interface import (
    AdminService,
    ContextService,
    EngineService,
    ModelService,
    SessionService,
    SnapshotService,
)
from jaxctx_server.service.models import LocalModelService
from jaxctx_server.service.sessions import LocalSessionService
from jaxctx_server.service.snapshots import LocalSnapshotService
from jaxctx_server.services import Services

SERVICERS: dict[str, type] = {
    "AdminService": AdminServicer,
    "ContextService": ContextServicer,
    "EngineService": EngineServicer,
    "ModelService": ModelServicer,
    "SessionService": SessionServicer,
    "SnapshotService": SnapshotServicer,
}
PROTOCOLS: dict[str, type] = {
    "AdminService": AdminService,
    "ContextService": ContextService,
    "EngineService": EngineService,
    "ModelService": ModelService,
    "SessionService": SessionService,
    "SnapshotService": SnapshotService,
}
IMPLEMENTATIONS: dict[str, list[type]] = {
    "AdminService": [LocalAdminService],
    "ContextService": [LocalContextService, RouterContextService],
    "EngineService": [EngineRegistration],
    "ModelService": [LocalModelService, RouterModelService],
    "SessionService": [LocalSessionService],
    "SnapshotService": [LocalSnapshotService, RouterSnapshotService],
}
METHODS = [
    pytest.param(service.name, method, id=f"{service.name}.{method.name}")
    for service in SERVICES.values()
    for method in service.methods
]


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_a_servicer_has_a_method_of_its_own(service: str, method: Any) -> None:
    function = SERVICERS[service].__dict__[method.name]
    assert inspect.isasyncgenfunction(function) == method.server_streaming
    assert inspect.iscoroutinefunction(function) != method.server_streaming
    assert f".{snake_case(method.name)}(" in inspect.getsource(function)


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_the_protocol_and_its_implementations_have_it_in_snake_case(service: str, method: Any) -> None:
    name = snake_case(method.name)
    protocol = PROTOCOLS[service].__dict__[name]
    assert inspect.getdoc(protocol)
    for implementation in IMPLEMENTATIONS[service]:
        function = implementation.__dict__[name]
        assert inspect.isasyncgenfunction(function) == method.server_streaming, implementation
        assert inspect.iscoroutinefunction(function) != method.server_streaming, implementation
        assert inspect.signature(function) == inspect.signature(protocol), implementation


@pytest.mark.parametrize("service", SERVICES)
def test_a_protocol_has_no_other_methods(service: str) -> None:
    public = {name for name in vars(PROTOCOLS[service]) if not name.startswith("_")}
    assert public == {snake_case(method.name) for method in SERVICES[service].methods}


@pytest.mark.parametrize("is_router", [False, True])
def test_a_server_has_every_service_in_every_role(is_router: bool) -> None:
    services = Services.make(ServerLifecycle(), lambda: 0.0, "", is_router=is_router)
    found = {
        "AdminService": services.admin,
        "ContextService": services.contexts,
        "EngineService": services.engines,
        "ModelService": services.models,
        "SessionService": services.sessions,
        "SnapshotService": services.snapshots,
    }
    assert found.keys() == SERVICES.keys()
    for name, service in found.items():
        assert type(service) in IMPLEMENTATIONS[name]
    assert isinstance(services.contexts, RouterContextService) == is_router
