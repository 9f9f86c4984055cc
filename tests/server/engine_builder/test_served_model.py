"""The model that settings name: types, products of 8 bits, places for adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxctx.engine.runner import matmul_choice
from jaxctx.model.functional import DecoderModel
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_server.config import CheckConfig, PlanConfig, ServeConfig
from jaxctx_server.engine_builder import build, served_model
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.engine_builder.check import check as check_engine
from jaxctx_server.engine_builder.plan import plan as plan_engine
from jaxctx_server.engine_builder.served_model import describe_model, load_served_model, model_shape
from jaxctx_server.errors import StartError
from tests.jaxctx.model.quantization.encode import FORMATS, write_quantized
from tests.server.engine_builder.settings import Silent, StandInEngine, refused, windowed


def test_weights_are_multiplied_as_the_faster_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured by the first start, and said by both."""
    caplog.set_level("INFO", "jaxctx")
    measured = []

    def measure(*weight: object) -> dict[str, tuple[float, ...]]:
        measured.append(weight)
        return {"bfloat16": (2.0, 2.0, 2.0), "float32": (1.0, 1.0, 1.0), "int16": (2.0, 2.0, 2.0)}

    monkeypatch.setattr(matmul_choice, "measure", measure)
    settings: dict[str, Any] = {"compile_cache": tmp_path / "cache", "dtype": "bfloat16", "weights_dtype": "int8"}
    config = ServeConfig(model=windowed(tmp_path / "model"), **settings)
    for _ in range(2):
        model = load_served_model(config, None, Silent()).model
        assert isinstance(model, DecoderModel)
        assert (model.dtype, model.weights_dtype, model.matmul_dtype) == ("bfloat16", "int8", "float32")
        assert "weights of 8 bits are multiplied as float32 (ms a product" in caplog.messages[-1]
    assert measured == [(16, 16, "int8")]
    asked = load_served_model(replace(config, matmul_dtype="int8"), None, Silent()).model
    assert isinstance(asked, DecoderModel)
    assert asked.matmul_dtype == "int8"
    assert len(measured) == 1


def test_a_model_that_computes_in_float32_multiplies_so(tmp_path: Path) -> None:
    """Though its configuration declares bfloat16: what is stored decides."""
    windowed(tmp_path)
    declared = json.loads((tmp_path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        declared[key] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(declared))
    config = ServeConfig(model=str(tmp_path), compile_cache=None, weights_dtype="int8")
    model = load_served_model(config, None, Silent()).model
    assert isinstance(model, DecoderModel)
    assert (model.dtype, model.matmul_dtype) == ("float32", "float32")


def test_weights_of_16_bits_are_multiplied_as_they_are(tmp_path: Path) -> None:
    error = refused(model=windowed(tmp_path), matmul_dtype="float32")
    assert str(error) == "--matmul-dtype: is for weights of 8 bits"
    for refuses in (plan_engine, check_engine):
        settings = PlanConfig if refuses is plan_engine else CheckConfig
        with pytest.raises(StartError, match="--matmul-dtype: is for weights of 8 bits"):
            refuses(settings(model=str(tmp_path), matmul_dtype="float32"), Silent())  # type: ignore[operator]


def test_weights_that_were_made_wide_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(windowed(tmp_path))
    config = json.loads((directory / "config.json").read_text())
    write_quantized(directory, config, FORMATS["awq"])
    served = []
    monkeypatch.setattr(build, "open_engine", lambda model, *_, **__: served.append(model) or StandInEngine())
    build_engine(ServeConfig(model=str(directory), compile_cache=None), Silent())
    words = "7 matrices of 4-bit integers with a scale for each 16 inputs were made float32, which takes 8 times"
    assert served[0].widened.startswith(words)
    assert served[0].widened in caplog.messages


def test_a_kernel_for_4_bits_is_not_tried_where_weights_are_to_be_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(windowed(tmp_path))
    write_quantized(directory, json.loads((directory / "config.json").read_text()), FORMATS["awq"])
    tried = []
    monkeypatch.setattr(
        served_model, "choose_int4", lambda *_, **__: tried.append(1) or Int4Device(None, "there is none")
    )
    (device,) = jax.devices("cpu")[:1]
    assert served_model.int4_device(ServeConfig(model=str(directory), weights_dtype="bfloat16"), device) is None
    assert not tried
    assert served_model.int4_device(ServeConfig(model=str(directory)), device) is not None
    assert tried


def test_a_plan_counts_the_slots_for_adapters(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model")
    plain = describe_model(ServeConfig(model), model_shape(ServeConfig(model)))[1]
    wide_config = ServeConfig(model, adapter_slots=2, adapter_rank=8)
    wide = describe_model(wide_config, model_shape(wide_config))[1]
    added = sum(each.size for each in wide) - sum(each.size for each in plain)
    # Two slots of rank 8: A and B of q, k, v, o, gate, up and down, of width 16, heads 2 x 8, KV heads 1 x 8.
    assert added == 16 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 16))
