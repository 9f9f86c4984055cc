"""As which type a CPU multiplies weights of 8 bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxctx.engine.runner import matmul_choice
from jaxctx.engine.runner.matmul_choice import CANDIDATES, ROWS, MatmulChoice, choose_matmul_dtype, fastest, measure
from jaxctx.errors import InvalidArgument
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import DecoderModel, abstract

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    width=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    ffn=48,
    max_positions=64,
)
SLOW, QUICK = (4.0, 4.0, 4.0), (1.0, 2.0, 4.0)  # the latter twice as fast
TIMES = {"bfloat16": SLOW, "float32": QUICK, "int16": SLOW}  # with weights of int8


KILLED_START = """
import pathlib, sys, time
from jaxctx.engine.runner import matmul_choice
from tests.jaxctx.engine.runner.test_matmul_choice import TIMES, model

moment, directory = sys.argv[1:]

def wait(*_):
    print(moment, flush=True)
    time.sleep(3600)

if moment == "writing":
    matmul_choice.measure = lambda *_: TIMES
    pathlib.Path.replace = wait
else:
    matmul_choice.measure = wait
matmul_choice.choose_matmul_dtype(model(), "auto", "cpu", pathlib.Path(directory))
"""


def model(dtype: str = "bfloat16", weights_dtype: str | None = "int8") -> DecoderModel:
    return abstract(CONFIG, dtype, weights_dtype=weights_dtype)[0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """What is measured; float32 turns out twice as fast as the others."""
    calls: list[tuple[int, int, str]] = []

    def found(*arguments: object) -> dict[str, tuple[float, ...]]:
        calls.append(arguments)  # type: ignore[arg-type]
        weights_dtype = arguments[-1]
        return {name: TIMES[name] for name in CANDIDATES[weights_dtype]}  # type: ignore[index]

    monkeypatch.setattr(matmul_choice, "measure", found)
    return calls


class TestMeasured:
    def test_the_faster_type_is_taken_and_remembered(self, tmp_path: Path, measured: list[object]) -> None:
        for _ in range(2):
            choice = choose_matmul_dtype(model(), "auto", "cpu", tmp_path / "matmul")
            assert choice is not None
            assert choice.dtype == "float32"
            assert choice.milliseconds == TIMES
        assert measured == [(48, 32, "int8")]

    def test_another_product_is_measured_by_itself(self, tmp_path: Path, measured: list[object]) -> None:
        for weights_dtype in ("int8", "float8_e4m3fn"):
            choose_matmul_dtype(model(weights_dtype=weights_dtype), "auto", "cpu", tmp_path)
        assert measured == [(48, 32, "int8"), (48, 32, "float8_e4m3fn")]

    def test_another_cpu_is_measured_by_itself(
        self, tmp_path: Path, measured: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for flags in ("avx2", "avx512f"):
            (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: {flags}\ncpu MHz: {len(measured)}\n")
            monkeypatch.setattr(matmul_choice, "CPU_INFO", tmp_path / "cpuinfo")
            choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
        assert len(measured) == 2
        (tmp_path / "cpuinfo").write_text("processor: 0\nflags: avx2\ncpu MHz: 17\n")
        choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
        assert len(measured) == 2

    def test_without_a_directory_each_start_measures(self, measured: list[object]) -> None:
        for _ in range(2):
            choose_matmul_dtype(model(), "auto", "cpu", None)
        assert len(measured) == 2

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{}",
            '{"bfloat16": [1.0, 1.0, 1.0]}',
            '{"bfloat16": [1.0, 1.0, 1.0], "float32": [1.0, 1.0, 1.0]}',  # of a version that knew no int16
            '{"bfloat16": [1.0, 1.0], "float32": [1.0, 1.0], "int16": [1.0, 1.0]}',
            '{"bfloat16": [1.0, 1.0, 1.0], "float32": [1.0, 0.0, 1.0], "int16": [1.0, 1.0, 1.0]}',
            '{"bfloat16": [1.0, 1.0, 1.0], "float32": [1.0, Infinity, 1.0], "int16": [1.0, 1.0, 1.0]}',
            '{"bfloat16": [1.0, 1.0, 1.0], "float32": "fast", "int16": [1.0, 1.0, 1.0]}',
            '{"bfloat16": [1.0, 1.0, 1.0], "float32": [null, 1.0, 1.0], "int16": [1.0, 1.0, 1.0]}',
        ],
    )
    def test_a_damaged_file_is_made_anew(self, tmp_path: Path, measured: list[object], text: str) -> None:
        choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
        (file,) = tmp_path.iterdir()
        file.write_text(text)
        choice = choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
        assert choice is not None
        assert choice.dtype == "float32"
        assert len(measured) == 2
        assert json.loads(file.read_text()) == {name: list(times) for name, times in TIMES.items()}

    def test_an_interrupted_start_leaves_nothing(
        self, tmp_path: Path, measured: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> object:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(matmul_choice, "measure", interrupted)
            with pytest.raises(KeyboardInterrupt):
                choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert choose_matmul_dtype(model(), "auto", "cpu", tmp_path) is not None
        assert len(measured) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", ["measuring", "writing"])
    def test_a_start_that_is_killed_leaves_no_half_file(
        self, tmp_path: Path, measured: list[object], moment: str
    ) -> None:
        """Killed while it measures, or between writing and renaming: the next start measures again."""
        command = [sys.executable, "-c", KILLED_START, moment, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as start:
            assert start.stdout is not None
            assert start.stdout.readline() == f"{moment}\n"  # and waits
            start.kill()
        assert start.returncode == -signal.SIGKILL
        assert not list(tmp_path.glob("*.json"))
        assert len(list(tmp_path.iterdir())) == (moment == "writing")  # under another name
        for _ in range(2):
            choice = choose_matmul_dtype(model(), "auto", "cpu", tmp_path)
            assert choice is not None
            assert choice.dtype == "float32"
        assert len(measured) == 1
        (file,) = tmp_path.glob("*.json")
        assert json.loads(file.read_text()) == {name: list(times) for name, times in TIMES.items()}

    @pytest.mark.parametrize("weights_dtype", ["int8", "float8_e4m3fn"])
    def test_a_real_measurement(self, weights_dtype: str, tmp_path: Path) -> None:
        """Smaller than a server's; nothing is said of which is faster here."""
        found = measure(96, 64, weights_dtype)
        assert set(found) == set(CANDIDATES[weights_dtype])
        assert all(len(times) == len(ROWS) and min(times) > 0 for times in found.values())

    def test_a_weight_is_measured_in_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matmul_choice, "WEIGHT_ELEMENTS", 64 * 16)
        seen: list[tuple[int, ...]] = []
        project = matmul_choice.project
        monkeypatch.setattr(
            matmul_choice, "project", lambda x, weight: seen.append(weight.values.shape) or project(x, weight)
        )
        measure(1 << 20, 64, "int8")
        assert set(seen) == {(16, 64)}


def test_a_small_gain_is_not_taken() -> None:
    """Two starts that measure a little differently compute the same."""
    assert fastest({"bfloat16": (1.1, 1.1, 1.1), "float32": (1.0, 1.0, 1.0)}, "bfloat16").dtype == "bfloat16"
    assert fastest({"bfloat16": (1.2, 1.2, 1.2), "float32": (1.0, 1.0, 1.0)}, "bfloat16").dtype == "float32"
    assert fastest({"bfloat16": (3.0, 1.0, 1.0), "float32": (1.0, 2.0, 2.0)}, "bfloat16").dtype == "bfloat16"


class TestNotMeasured:
    @pytest.mark.parametrize("wanted", ["bfloat16", "float32", "int8", "int16"])
    def test_what_is_asked_for(self, wanted: str, measured: list[object]) -> None:
        assert choose_matmul_dtype(model(), wanted, "cpu", None) == MatmulChoice(wanted, {})
        assert not measured

    def test_float32_models_stay_so(self, measured: list[object]) -> None:
        assert choose_matmul_dtype(model("float32"), "auto", "cpu", None) == MatmulChoice("float32", {})
        assert not measured

    def test_an_accelerator_multiplies_as_it_computes(self, measured: list[object]) -> None:
        for wanted in ("auto", "bfloat16"):
            assert choose_matmul_dtype(model(), wanted, "gpu", None) == MatmulChoice("bfloat16", {})
        assert not measured

    def test_weights_of_16_bits_have_no_choice(self, measured: list[object]) -> None:
        assert choose_matmul_dtype(model(weights_dtype=None), "auto", "cpu", None) is None
        assert not measured


@pytest.mark.parametrize(
    ("weights_dtype", "wanted", "platform", "why"),
    [
        (None, "float32", "cpu", "8 bits"),
        ("int8", "float32", "gpu", "must be bfloat16"),
        ("int8", "int8", "tpu", "must be bfloat16"),
        ("int8", "int16", "gpu", "must be bfloat16"),
        ("float8_e4m3fn", "int8", "cpu", "float8_e4m3fn"),
        ("float8_e4m3fn", "int16", "cpu", "int16 needs weights of int8"),
    ],
)
def test_a_type_that_cannot_be(weights_dtype: str | None, wanted: str, platform: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        choose_matmul_dtype(model(weights_dtype=weights_dtype), wanted, platform, None)
    assert [each.field for each in caught.value.violations] == ["matmul_dtype"]


def test_the_line_for_the_log() -> None:
    told = MatmulChoice("float32", {"bfloat16": SLOW, "float32": QUICK}).describe()
    assert told == (
        "weights of 8 bits are multiplied as float32 (ms a product of 4, 16, 256 rows: "
        "bfloat16 4.00 4.00 4.00, float32 1.00 2.00 4.00)"
    )
    assert MatmulChoice("int8", {}).describe() == "weights of 8 bits are multiplied as int8"
