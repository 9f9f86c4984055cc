"""What all transports of one server share: the way in of their calls, and the services behind it.

By the server's role the services run on the engine of this process, or on the engines of others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import MakeCredentials
from jaxctx_server.auth import Key, Role
from jaxctx_server.call_record import current_record
from jaxctx_server.call_trace import CallTracer
from jaxctx_server.cluster import ALONE, Cluster
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.metrics.server_metrics import ServerMetrics
from jaxctx_server.router.context_service import RouterContextService
from jaxctx_server.router.engines import RouterEngines
from jaxctx_server.router.forwarding import Forwarder
from jaxctx_server.router.leftovers import LeftoverContexts
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
from jaxctx_server.service.pipeline import CallPipeline
from jaxctx_server.service.request_reader import RequestReader
from jaxctx_server.service.sessions import LocalSessionService
from jaxctx_server.service.snapshot_quota import LocalSnapshotQuota, SnapshotQuota, UnknownSnapshotQuota
from jaxctx_server.service.snapshots import LocalSnapshotService

MAX_DEADLINE_S = 86400.0  # of a call without a deadline: no call waits for ever


def make_caller(key: Key, clock: Callable[[], float], timeout_s: float | None = None) -> Caller:
    """Who makes the running call, with this key, and until when it may wait and run. None: as long as any call may."""
    deadline = clock() + (MAX_DEADLINE_S if timeout_s is None else timeout_s)
    return Caller(
        tenant=key.tenant,
        deadline=deadline,
        traceparent=current_record().traceparent,
        of_cluster=key.role is Role.CLUSTER,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One implementation of each service, for all transports of the server."""

    contexts: ContextService
    snapshots: SnapshotService
    models: ModelService
    sessions: SessionService
    admin: AdminService
    engines: EngineService
    snapshot_quota: SnapshotQuota  # is no service of the contract

    @classmethod
    def make(
        cls,
        lifecycle: ServerLifecycle,
        clock: Callable[[], float],
        cluster_key: str,
        *,
        is_router: bool,
        generations: GenerationMetrics | None = None,
        credentials: MakeCredentials | None = None,
    ) -> Self:
        """The services of a server. `clock` is that of deadlines, `cluster_key` the cluster's secret ("": none);
        `generations` is where outputs are counted; `credentials` makes those of a router's channel to an engine (None:
        without TLS).
        """
        engines, placements = RouterEngines(lifecycle), PlacementTable()
        leftovers = LeftoverContexts(engines, placements, clock)
        migrator = Migrator(engines, placements, leftovers, clock)
        registration = EngineRegistration(lifecycle, migrator, clock, cluster_key, credentials)
        sessions, admin = LocalSessionService(lifecycle), LocalAdminService(lifecycle)
        if not is_router:
            return cls(
                contexts=LocalContextService(lifecycle, generations),
                snapshots=LocalSnapshotService(lifecycle),
                models=LocalModelService(lifecycle),
                sessions=sessions,
                admin=admin,
                engines=registration,  # which says that this server is no router
                snapshot_quota=LocalSnapshotQuota(lifecycle),
            )
        planner = Planner(engines, leftovers, clock)
        forwarder = Forwarder(lifecycle, engines, placements, planner, leftovers)
        lister = Lister(engines, forwarder)
        watcher = Watcher(lifecycle, engines, placements)
        return cls(
            contexts=RouterContextService(forwarder, lister, planner, watcher, placements, migrator, generations),
            snapshots=RouterSnapshotService(forwarder, lister, placements),
            models=RouterModelService(forwarder, lister),
            sessions=sessions,
            admin=admin,
            engines=registration,
            snapshot_quota=UnknownSnapshotQuota(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The objects that all transports of one server share. Made on the event loop that runs the server."""

    lifecycle: ServerLifecycle
    pipeline: CallPipeline
    services: Services
    clock: Callable[[], float]  # of deadlines, in seconds
    max_calls: int  # at once, over all connections and transports
    metrics: ServerMetrics

    @classmethod
    def make(
        cls,
        lifecycle: ServerLifecycle,
        keys: KeyStore | Sequence[Key] | None,
        *,
        max_calls: int,
        clock: Callable[[], float] = time.monotonic,
        cluster: Cluster = ALONE,
        is_router: bool = False,
        role: str | None = None,
        tracer: CallTracer | None = None,
    ) -> Self:
        """The backend of a server. `is_router`: engines elsewhere answer what needs a model. `role`: the setting
        --role, for its metrics; None: router or both. `tracer` makes spans of its calls; None: they have none.
        """
        metrics = ServerMetrics(lifecycle, role or ("router" if is_router else "both"))
        pipeline = CallPipeline(
            KeyStore.of(keys),
            RequestReader(lifecycle),
            max_calls=max_calls,
            incarnation=cluster.incarnation,
            metrics=metrics.calls,
            tracer=tracer,
        )
        services = Services.make(
            lifecycle,
            clock,
            cluster.key,
            is_router=is_router,
            generations=metrics.generations,
            credentials=cluster.credentials,
        )
        return cls(
            lifecycle=lifecycle,
            pipeline=pipeline,
            services=services,
            clock=clock,
            max_calls=max_calls,
            metrics=metrics,
        )
