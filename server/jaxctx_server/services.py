"""The services of one server: by its role on the engine of this process, or on the engines of others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.router.context_service import RouterContextService
from jaxctx_server.router.engines import RouterEngines
from jaxctx_server.router.forwarding import Forwarder
from jaxctx_server.router.listing import Lister
from jaxctx_server.router.migration import Migrator
from jaxctx_server.router.model_service import RouterModelService
from jaxctx_server.router.placement import PlacementTable
from jaxctx_server.router.planning import Planner
from jaxctx_server.router.registration import EngineRegistration
from jaxctx_server.router.snapshot_service import RouterSnapshotService
from jaxctx_server.router.watch import Watcher
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One implementation of each service, for all transports of the server."""

    contexts: ContextService
    snapshots: SnapshotService
    models: ModelService
    sessions: SessionService
    admin: AdminService
    engines: EngineService

    @classmethod
    def make(
        cls,
        lifecycle: ServerLifecycle,
        clock: Callable[[], float],
        cluster_key: str,
        *,
        is_router: bool,
        generations: GenerationMetrics | None = None,
    ) -> Self:
        """The services of a server. `clock` is that of deadlines, `cluster_key` the cluster's secret ("": none);
        `generations` is where outputs are counted.
        """
        engines, placements = RouterEngines(lifecycle), PlacementTable()
        migrator = Migrator(engines, placements, clock)
        registration = EngineRegistration(lifecycle, migrator, clock, cluster_key)
        sessions, admin = LocalSessionService(lifecycle), LocalAdminService(lifecycle)
        if not is_router:
            return cls(
                contexts=LocalContextService(lifecycle, generations),
                snapshots=LocalSnapshotService(lifecycle),
                models=LocalModelService(lifecycle),
                sessions=sessions,
                admin=admin,
                engines=registration,  # which says that this server is no router
            )
        planner = Planner(engines, clock)
        forwarder = Forwarder(lifecycle, engines, placements, planner)
        lister = Lister(engines, forwarder)
        watcher = Watcher(lifecycle, engines, placements)
        return cls(
            contexts=RouterContextService(forwarder, lister, planner, watcher, placements, generations),
            snapshots=RouterSnapshotService(forwarder, lister, placements),
            models=RouterModelService(forwarder, lister),
            sessions=sessions,
            admin=admin,
            engines=registration,
        )
