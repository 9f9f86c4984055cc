"""Engines: what they are, and how loaded."""

from __future__ import annotations

from dataclasses import replace

from jaxctx import types
from jaxctx.convert import engines
from jaxctx.v1 import admin_service_pb2
from tests.jaxctx.convert.examples import example_of


def test_the_mesh_is_a_copy_of_the_message() -> None:
    message = admin_service_pb2.EngineInfo(mesh={"data": 1, "model": 2})
    info = engines.engine_info_from_proto(message)
    message.mesh["model"] = 4
    assert info.mesh == {"data": 1, "model": 2}


def test_counters_of_an_engine_do_not_get_mixed_up() -> None:
    """Each has a value of its own, so that one in the place of another is another result."""
    names = [field.name for field in admin_service_pb2.EngineStats.DESCRIPTOR.fields if field.name != "draining"]
    message = admin_service_pb2.EngineStats(**{name: number for number, name in enumerate(names, 1)})
    stats = engines.engine_stats_from_proto(message)
    assert [getattr(stats, name) for name in names] == list(range(1, len(names) + 1))
    assert not stats.draining
    assert engines.engine_stats_to_proto(stats) == message
    assert engines.engine_stats_to_proto(replace(stats, draining=True)).draining


def test_numbers_and_names_of_an_engine_do_not_get_mixed_up() -> None:
    fields = [field for field in admin_service_pb2.EngineInfo.DESCRIPTOR.fields if field.name != "mesh"]
    values = {
        field.name: field.name if field.type == field.TYPE_STRING else number for number, field in enumerate(fields, 1)
    }
    message = admin_service_pb2.EngineInfo(**values)
    info = engines.engine_info_from_proto(message)
    assert {name: getattr(info, name) for name in values} == values
    assert engines.engine_info_to_proto(info) == message


def test_a_status_has_the_engine_its_load_and_where_it_is() -> None:
    status = types.EngineStatus(
        info=example_of(types.EngineInfo), stats=example_of(types.EngineStats), address="host:1", epoch=3
    )
    sent = engines.engine_status_to_proto(status)
    assert (sent.address, sent.epoch) == ("host:1", 3)
    assert sent.info == engines.engine_info_to_proto(status.info)
    assert sent.stats == engines.engine_stats_to_proto(status.stats)
    assert engines.engine_status_from_proto(sent) == status


def test_an_engine_of_one_process_has_no_address() -> None:
    status = engines.engine_status_from_proto(admin_service_pb2.Engine())
    assert (status.address, status.epoch) == ("", 0)
