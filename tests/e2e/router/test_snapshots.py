"""Snapshots and publications of all engines."""

from __future__ import annotations

import pytest

import jaxctx
from jaxctx import errors
from tests.e2e.router_cluster import (
    LONG_TEXT,
    RouterCluster,
    create_on,
)


async def test_snapshots_of_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    contexts = [await client.context(await create_on(router_cluster, address)) for address in router_cluster.engines]
    for n, context in enumerate(contexts):
        await context.fill(f"Number {n}")
        await context.save(f"s{n}")
        with pytest.raises(errors.AlreadyExists):
            await contexts[1 - n].save(f"s{n}")
    assert (await contexts[0].save("s0", overwrite_version=1)).version == 2
    assert [each.name async for each in client.snapshots()] == ["s0", "s1"]
    assert [each.version for each in await client.history("s0")] == [2, 1]
    with pytest.raises(errors.NotFound) as error:
        await client.history("s2")
    assert error.value.reason == "SNAPSHOT_NOT_FOUND"
    for n, context in enumerate(contexts):
        opened = await client.open(f"s{n}", context_id=f"opened{n}")
        assert await opened.tokens() == await context.tokens()
        with pytest.raises(errors.AlreadyExists):
            await client.open(f"s{1 - n}", context_id=f"opened{n}")
        assert (await client.update_snapshot(f"s{n}", labels={"a": "b"})).labels == {"a": "b"}
    await client.take("s1")
    with pytest.raises(errors.NotFound):
        await client.snapshot("s1")
    assert await client.delete_snapshot("s0") == 2


async def test_publications_of_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    published = []
    for address in router_cluster.engines:
        context = await client.context(await create_on(router_cluster, address))
        await context.fill(f"At {address} " + LONG_TEXT)
        published.append((await context.publish()).publication_id)
    assert [each.publication_id for each in await client.publications()] == sorted(published)
    for each in published:
        assert (await client.update_publication(each, labels={"a": "b"})).labels == {"a": "b"}
        await client.unpublish(each)
    assert await client.publications() == []
    with pytest.raises(errors.NotFound) as error:
        await client.unpublish(published[0])
    assert error.value.reason == "PUBLICATION_NOT_FOUND"
