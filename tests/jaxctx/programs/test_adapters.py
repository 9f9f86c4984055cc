"""Calls of programs that name an adapter as their model."""

from __future__ import annotations

import pytest

from jaxctx import errors
from jaxctx.types import VariableState
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop
from tests.jaxctx.programs.scripted import ScriptedEngine


async def test_a_call_runs_where_its_adapter_is() -> None:
    engines = ScriptedEngine("a"), ScriptedEngine("b")
    harness = ProgramsHarness(*engines)
    engines[1].adapter_revisions["sql"] = "1"
    session = harness.session()
    for _ in range(3):
        assert await ask(session, call(session, "text {{o}}", model_id="sql", o=output("o"))["o"])
    assert not engines[0].did("create")
    assert [request.adapter for request in engines[1].created] == ["sql"] * 3
    with pytest.raises(errors.NotFound) as raised:
        call(session, "text {{o}}", model_id="none", o=output("o"))
    assert raised.value.reason == "MODEL_NOT_FOUND"
    await ask(session, call(session, "text {{o}}", o=output("o"))["o"])
    assert [request.adapter for engine in engines for request in engine.created].count("") == 1


async def test_each_content_keeps_its_own_prefix() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    template = "a prefix that is long enough for a page of its own, and then some more: {{o}}"
    for revision in ("1", "2", "2"):
        engine.adapter_revisions["sql"] = revision
        await ask(session, call(session, template, model_id="sql", o=output("o"))["o"])
        await run_event_loop()
    await ask(session, call(session, template, o=output("o"))["o"])
    await run_event_loop()
    assert [revision for _, revision, _ in harness.nodes[0].prefixes] == ["1", "2", ""]


async def test_a_call_does_not_go_on_with_other_weights() -> None:
    engines = ScriptedEngine("a"), ScriptedEngine("b")
    for engine, revision in zip(engines, "12", strict=True):
        engine.adapter_revisions["sql"] = revision
    harness = ProgramsHarness(*engines)
    session = harness.session()
    ids = call(session, "text {{first}} and {{second}}", model_id="sql", first=output("first"), second=output("second"))
    assert await ask(session, ids["first"])
    used = next(node for node in harness.nodes if node.engine.did("create"))
    harness.registry.lose(used)
    await run_event_loop()
    with pytest.raises(errors.FailedPrecondition, match="other weights") as raised:
        await ask(session, ids["second"])
    assert raised.value.reason == "ADAPTER_MISMATCH"
    assert session.variable(ids["second"]).state is VariableState.FAILED
