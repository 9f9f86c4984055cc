"""Publications: prefixes that contexts of all tenants may share, of the same model and salt.

A publication is a context of a hidden tenant, which holds copies of its pages and is pinned. Called on the step thread;
every method returns at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.contexts.quotas import Quotas, hidden_tenant
from jaxctx.engine.interface import Caller
from jaxctx.engine.snapshots.info import publication_info
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.types import Publication, RetentionUpdate


@dataclass(frozen=True, slots=True)
class Publications:
    """The publications of one engine. Callers see their own only."""

    cache: ContextCache
    contexts: ContextOperations
    lifecycle: ContextLifecycle
    quotas: Quotas
    new_id: Callable[[], str]

    def publish(self, caller: Caller, context: Context, settings: RetentionUpdate) -> Publication:
        """Publish the committed pages of a context that is not suspended: one of the caller's, or a hidden fork of one.

        Raises FailedPrecondition if there are none, ResourceExhausted (PIN_BUDGET, OUT_OF_PAGES).
        """
        pages = context.committed_pages
        if not pages:
            raise FailedPrecondition("the context has no full page to publish")
        self.quotas.check_pin(caller.tenant, None, pages)
        self.contexts.claim(context, pages)
        published = self.cache.publish(context, f"pub_{self.new_id()}", tenant=hidden_tenant(caller.tenant))
        self.quotas.charge(caller.tenant, published, pages)
        self.lifecycle.update_retention(published, settings.ttl, settings.labels)
        return publication_info(published)

    def update(self, caller: Caller, publication_id: str, settings: RetentionUpdate) -> Publication:
        """Change time to live or labels. Raises NotFound (PUBLICATION_NOT_FOUND)."""
        published = self._find(caller, publication_id)
        self.lifecycle.update_retention(published, settings.ttl, settings.labels)
        return publication_info(published)

    def unpublish(self, caller: Caller, publication_id: str) -> None:
        """End a publication; who shares its pages keeps them. Raises NotFound (PUBLICATION_NOT_FOUND)."""
        self.lifecycle.close(self._find(caller, publication_id))

    def list(self, caller: Caller) -> Sequence[Publication]:
        """All publications of the caller, in the order of their ids."""
        return [publication_info(published) for published in sorted(self._published(caller), key=_id_of)]

    def _find(self, caller: Caller, publication_id: str) -> Context:
        for published in self._published(caller):
            if published.id == publication_id:
                return published
        raise NotFound(f"no publication {publication_id!r}", reason="PUBLICATION_NOT_FOUND")

    def _published(self, caller: Caller) -> Sequence[Context]:
        now, tenant = self.lifecycle.clock(), hidden_tenant(caller.tenant)
        return [
            published
            for published in self.cache.publications.values()
            if published.tenant == tenant and not published.lifetime.over(now)
        ]


def _id_of(context: Context) -> str:
    return context.id
