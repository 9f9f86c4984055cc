"""The examples of programs as their files stand, and the benchmark of programs with small texts."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(("script", "told"), [("map_reduce.py", "in short: "), ("chain.py", "")])
async def test_examples(address: str, script: str, told: str) -> None:
    path = str(SCRIPTS / "examples" / script)
    process = await asyncio.create_subprocess_exec(sys.executable, path, address, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    assert output.decode(errors="replace").startswith(told)
    assert len(output) > 10


async def test_the_benchmark_of_programs(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_programs", SCRIPTS / "bench_programs.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "SYSTEM", "Rules.")
    await bench.measure(address, 1, [0.0])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(bench.WORKLOADS)
    assert all(float(line.split()[-3]) > 0 for line in lines[1:])
