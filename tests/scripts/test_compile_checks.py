"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiled_functions import (
    EIGHT_BIT_WEIGHTS,
    INT4,
    PRODUCTS,
    PUBLISHED_STEPS,
    SHORT,
    SIZES,
    WHOLE_STEPS,
    functions,
    one_layer_of_each_kind,
)
from compiler_output.sass import Loop, MachineCode
from published_models import PUBLISHED

from jaxctx.engine.plan.memory_planner import TARGETS
from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.model.config import SHAPES, LayerAttention
from jaxctx.model.registry import FAMILIES, from_hf
from jaxctx.model.weights import read_config
from scripts.compile_checks import (
    BASELINE,
    COMPILED_ALWAYS,
    COUNTS,
    EXACT,
    FINGERPRINT_DIGITS,
    MOST,
    PACKAGES,
    SMALL_BYTES,
    SOME,
    WITH_BUNDLES,
    WITH_COPIES,
    WITH_MACHINE_CODE,
    Doing,
    compare,
    count_loops,
    fingerprint,
    is_as_before,
    is_checked,
    is_one_too_many,
    matches,
    parts,
    selected,
    takes_pages,
    updates_pages,
)

DOCUMENT = BASELINE.parents[1] / "docs" / "kernels" / "index.md"
BEFORE = {"arguments": 1 << 30, "not_in_place": 6000, "temporaries": 100 << 20, "code": 50 << 20}
COUNTED = dict.fromkeys([each for each in (*COUNTS, *EXACT) if each not in MOST], 1000)


def kept() -> dict[str, Any]:
    """The baseline."""
    read: dict[str, Any] = json.loads(BASELINE.read_text())
    return read


def test_what_stays_or_shrinks_is_fine() -> None:
    assert compare("step x", BEFORE | COUNTED, BEFORE | COUNTED) == []
    assert compare("step x", BEFORE | {"temporaries": 101 << 20, "code": 1}, BEFORE) == []
    assert compare("step x", BEFORE | {"arguments": 2 << 30}, BEFORE) == []  # which weights there are is no cost


@pytest.mark.parametrize("what", ["temporaries", "code"])
def test_growth_is_named(what: str) -> None:
    (wrong,) = compare("kernel x", BEFORE | {what: int(BEFORE[what] * 1.03)}, BEFORE)
    assert wrong.startswith(f"{what} grew from {BEFORE[what]:,} to ")
    assert compare("kernel x", BEFORE | {what: SMALL_BYTES}, BEFORE | {what: 0}) == []


@pytest.mark.parametrize("what", COUNTED)
def test_growth_of_counts_is_named(what: str) -> None:
    before = BEFORE | COUNTED
    fine, more = (1000, 1001) if what in EXACT else (1020, 1021)
    assert compare("step x", before | {what: fine}, before) == []
    assert compare("step x", before | {what: more}, before) == [f"{what} grew from 1,000 to {more:,}"]
    assert compare("step x", BEFORE, before) == []  # where it cannot be counted
    assert compare("step x", BEFORE | {what: 1}, BEFORE) == [f"{what} is not in the baseline: run with --update"]


@pytest.mark.parametrize(("what", "most"), MOST.items())
def test_what_nothing_may_have_whatever_the_baseline_says(what: str, most: int) -> None:
    found = BEFORE | {what: most}
    assert compare("step x", found, found) == []
    more = BEFORE | {what: most + 1}
    assert compare("step x", more, more) == [f"{most + 1:,} {what}, and {most:,} at most"]


def test_a_step_that_copies_pages_fails_whatever_the_baseline_says() -> None:
    copies = BEFORE | {"not_in_place": 32 << 20}
    for name in ("step x", "write x", "page copy, x", "page load, x"):
        assert "not written in place" in compare(name, copies, copies)[0]
    for name in ("kernel x", "page save, x"):
        assert compare(name, copies, copies) == []  # what these return is new


def test_functions_of_whole_pages_may_copy_no_pool() -> None:
    names = [name for name, _ in functions() if name.startswith("page ")]
    assert {name.partition(",")[0] for name in names} == {"page copy", "page save", "page load"}
    assert all(takes_pages(name) for name in names)
    assert [name for name in names if not updates_pages(name)] == [name for name in names if "save" in name]
    copied = BEFORE | {"pool_copies": 1}
    for name in names:
        assert compare(name, copied, copied) == ["1 pool_copies, and 0 at most"]


def test_what_the_baseline_lacks_fails() -> None:
    assert compare("step x", BEFORE, None) == ["not in the baseline: run with --update"]


LOOPS = (
    Loop(0, 96, {"UTMALDG": 8, "SYNCS": 2}, 71),
    Loop(100, 500, {"HGMMA": 12, "BAR": 3, "SYNCS": 4, "FSEL": 400}, 611),
    Loop(500, 800, {"HGMMA": 12, "BAR": 2, "SYNCS": 4, "FFMA": 300}, 300),
)


def test_loops_are_counted() -> None:
    assert count_loops(MachineCode("attend_unit_0", 168, 0, 182272, LOOPS)) == {
        "registers": 168,
        "spills": 0,
        "shared_bytes": 182272,
        "loop_instructions": 300,
        "masked_loop_instructions": 611,
        "loop_barriers": 6,
        "loop_copies": 8,
    }


def test_each_function_of_a_target_is_in_one_part() -> None:
    """What is counted apart, since a compiler that writes bundles does so for everything."""
    for target in PACKAGES:
        in_parts = [name for part in parts(target) for name in part.names()]
        assert sorted(in_parts) == sorted(name for name, _ in functions() if is_checked(target, name))
    assert [part.counted for part in parts("v5e")] == [False, True]
    assert [part.counted for part in parts("v7x")] == [False, True]
    assert [part.counted for part in parts("h200")] == [False]
    assert [part.counted for part in parts("a100-80gb")] == [False]


def test_some_targets_are_checked_in_part() -> None:
    assert is_checked("v5e", "kernel x")
    assert is_checked("v7x", "write int8, 64 rows, pages of 64")
    assert is_checked("v7x", "page load, int8, pages of 128")
    assert not is_checked("v7x", "step qwen3-0.6b, 512 rows")
    assert is_checked("a100-80gb", "published step Gemma 2 2B, 16 rows")
    assert not is_checked("a100-80gb", "short step, 16 rows")


def lowered(factor: float) -> jax.stages.Lowered:
    def scale(x: jax.Array) -> jax.Array:
        return x * factor

    return jax.jit(scale).lower(jax.ShapeDtypeStruct((8,), jnp.float32))


def test_equal_programs_have_equal_fingerprints() -> None:
    """Whatever line they come from; another number, or another option of the compiler, is another program."""
    one = fingerprint(lowered(2.0), {"a": 1, "b": 2})
    again = fingerprint(lowered(2.0), {"b": 2, "a": 1})
    assert one == again
    assert len(one) == FINGERPRINT_DIGITS
    assert len({one, fingerprint(lowered(3.0), {"a": 1, "b": 2}), fingerprint(lowered(2.0), {"a": 1, "b": 3})}) == 3


NOW, LATER = Doing(everything=False, update=False), Doing(everything=True, update=False)


@pytest.mark.parametrize(
    ("name", "program", "doing", "as_before"),
    [
        ("write x", "of the baseline", NOW, True),
        ("write x", "another", NOW, False),
        ("write new", "of the baseline", NOW, False),
        ("write x", "of the baseline", LATER, False),
        ("page load, int8, pages of 128", "of the baseline", NOW, False),  # always compiled
    ],
)
def test_only_programs_of_the_baseline_are_not_compiled(name: str, program: str, doing: Doing, as_before: bool) -> None:
    programs = dict.fromkeys(("write x", "page load, int8, pages of 128"), "of the baseline")
    assert is_as_before(name, program, programs, doing) == as_before


@pytest.mark.parametrize(("most", "compiled"), [(None, 5), (0, 0), (3, 3)])
def test_of_many_changed_programs_some_are_compiled(most: int | None, compiled: int) -> None:
    doing = NOW._replace(most_changed=most)
    assert [is_one_too_many(changed, doing) for changed in range(1, 6)].count(False) == compiled


def test_the_baseline_is_of_the_options_that_compilers_are_told() -> None:
    """With others all programs of a target are changed: CI would compile for an hour."""
    for target, of_target in kept().items():
        platform = "tpu" if PACKAGES[target] == "libtpu" else "gpu"
        assert of_target["options"] == compiler_options(platform, {}), target


def test_steps_of_all_layers_are_left_for_later() -> None:
    for target in ("v5e", "h200"):
        left_out = {name for part in parts(target) for name in part.names()}
        left_out -= {name for part in parts(target) for name in selected(part, "*", NOW)}
        assert left_out == {f"step {model_name}, {rows} rows" for model_name, rows in WHOLE_STEPS}
        assert all(selected(part, "*", LATER) == part.names() for part in parts(target))
    assert selected(parts("v6e")[0], "published step Gemma 2B,*", NOW) == ["published step Gemma 2B, 16 rows"]


def test_some_of_every_part_is_always_compiled() -> None:
    """With all readers of compilers' output: bundles, machine code, launches, and copies."""
    for target in PACKAGES:
        for part in parts(target):
            assert any(matches(name, COMPILED_ALWAYS) for name in part.names())
    names = {name for name in kept()["h200"]["functions"] if matches(name, COMPILED_ALWAYS)}
    assert names & set(WITH_MACHINE_CODE)
    assert any(matches(name, WITH_COPIES) for name in names)
    assert len(names) < 10


def test_the_baseline_has_every_check() -> None:
    baseline = kept()
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in functions()]
    assert len(names) == len(set(names))
    for target, of_target in baseline.items():
        assert sorted(of_target["functions"]) == sorted(name for name in names if is_checked(target, name))
        assert sorted(of_target["programs"]) == sorted(of_target["functions"])
        assert sorted(of_target["versions"]) == sorted(["jax", PACKAGES[target]])


def test_the_baseline_of_tpus_has_bundles_and_no_copies_of_pools() -> None:
    for target, of_target in kept().items():
        if PACKAGES[target] == "libtpu":
            for name, found in of_target["functions"].items():
                assert ({"bundles", "bundles_run", "spill_stores"} <= set(found)) == matches(name, WITH_BUNDLES)
                assert ("pool_copies" in found) == takes_pages(name)
                assert found.get("pool_copies", 0) == 0


def test_the_baseline_of_published_steps_has_no_copies() -> None:
    for of_target in kept().values():
        for name, found in of_target["functions"].items():
            assert ("weight_copies" in found) == matches(name, WITH_COPIES)
            if matches(name, WITH_COPIES):
                assert (found["pool_copies"], found["weight_copies"]) == (0, 0)


def test_the_table_in_the_documents_is_the_baseline() -> None:
    section = DOCUMENT.read_text("utf-8").partition("## Published models\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:published |short |)step .+?) \| (\S+) \| (\S+) \| (\S+) \|$", section, re.MULTILINE)
    baseline = kept()
    for name, *cells in rows:
        temporaries = [baseline[target]["functions"][name]["temporaries"] for target in ("v5e", "v6e", "h200")]
        assert cells == [f"{size / 1e6:.1f}" for size in temporaries], name
    assert {name for name, *_ in rows} >= {name for name in baseline["h200"]["functions"] if matches(name, WITH_COPIES)}


def test_every_family_has_a_compiled_step() -> None:
    """Of the shapes that are built in, or of the published ones, in which it has a layer of each kind."""
    names = [name for name, _ in functions()]
    built_in = [path.name for path in SHAPES.iterdir() if any(path.name in name for name in names)]
    compiled = {read_config(SHAPES / name).architecture for name in built_in}
    compiled |= {from_hf(PUBLISHED[name]).architecture for name in PUBLISHED_STEPS}
    assert compiled >= {*FAMILIES} - {"Gemma3ForConditionalGeneration", "Olmo2ForCausalLM"}  # text of Gemma 3, OLMo 3's


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_layer_of_each_kind_is_what_the_model_has(name: str) -> None:
    config = from_hf(PUBLISHED[name])
    short = one_layer_of_each_kind(config)
    assert short.layers == len({config.attention_of(layer) for layer in range(config.layers)})
    assert {short.attention_of(layer) for layer in range(short.layers)} == {*config.layer_attention}
    assert short.experts_of(0) == config.experts_of(0)
    assert replace(short, layers=1, layer_attention=(), experts=None) == replace(
        config, layers=1, layer_attention=(), experts=None
    )


def test_dense_layers_and_windows_are_kinds_of_layers() -> None:
    config = from_hf(PUBLISHED["Qwen1.5 MoE A2.7B"])
    sliding, full = LayerAttention(window=8), LayerAttention()
    experts = config.experts and replace(config.experts, dense_layers=(0, 1, 4))
    short = one_layer_of_each_kind(replace(config, layers=6, layer_attention=(full, sliding), experts=experts))
    assert [short.attention_of(layer) for layer in range(short.layers)] == [full, sliding, full, sliding]
    assert [short.experts_of(layer) is None for layer in range(short.layers)] == [True, True, False, False]


def test_the_baseline_of_a_gpu_has_one_launch_a_step_and_short_sorts() -> None:
    steps = {name: found for name, found in kept()["h200"]["functions"].items() if "step" in name}
    assert len(steps) > 5
    for found in steps.values():
        assert found["launches"] == 1
        assert 0 < found["sorted"] <= MOST["sorted"]
        assert found["sorts"] > 0


def test_the_baseline_of_a_gpu_has_machine_code() -> None:
    of_target = kept()["h200"]
    assert sorted(of_target["tools"]) == ["nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"]
    assert {name for name, found in of_target["functions"].items() if "registers" in found} == set(WITH_MACHINE_CODE)


def test_sums_over_chips_are_of_bfloat16() -> None:
    for target, of_target in kept().items():
        split = [
            found for name, found in of_target["functions"].items() if name.endswith("on four chips") and "step" in name
        ]
        assert split or target in SOME
        for found in split:
            assert found["all_reduces"] == found["all_reduces_of_bf16"] > 0
            assert found["other_collectives"] == 0


@pytest.mark.parametrize("target", [target for target in PACKAGES if target not in SOME])
def test_weights_of_8_bits_take_half_the_memory_and_not_one_layer_is_widened(target: str) -> None:
    found = kept()[target]["functions"]
    config = read_config(SHAPES / "qwen3-0.6b")
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.width * (attention + 3 * config.ffn)  # numbers, each of which takes a byte less
    for rows, dtype in EIGHT_BIT_WEIGHTS:
        wide, narrow = found[f"short step, {rows} rows"], found[f"short step, {rows} rows, weights of {dtype}"]
        assert narrow["wide_weights"] == 0
        assert wide["arguments"] - narrow["arguments"] >= 0.98 * SHORT["layers"] * layer  # scales are the rest
        assert narrow["temporaries"] < wide["temporaries"] + 2 * layer


@pytest.mark.parametrize("target", [target for target in PACKAGES if target not in SOME])
def test_weights_of_4_bits_take_less_than_those_of_8_and_none_is_widened_or_copied(target: str) -> None:
    found = kept()[target]["functions"]
    group, has_zeros = INT4
    step = found[f"short step llama-3.1-8b, 16 rows, weights of int4 in groups of {group}"]
    config = read_config(SHAPES / "llama-3.1-8b")
    layer = config.width * ((2 * config.heads + 2 * config.kv_heads) * config.head_dim + 3 * config.ffn)
    in_4_bits = layer / 2 + (1 + has_zeros) * 4 * layer / group
    whole = 2 * 2 * config.vocab_size * config.width  # embedding and head
    pool = 2 * 2 * SHORT["layers"] * SIZES.pages * SIZES.page_size * config.kv_heads * config.head_dim
    others = step["arguments"] - whole - pool - SHORT["layers"] * in_4_bits
    assert 0 <= others < SHORT["layers"] * layer / 4  # of sampling; weights of 8 bits would be as much again
    assert step["wide_weights"] == 0
    assert step["temporaries"] < layer / 4
    for rows, size, zeros in PRODUCTS:
        assert (
            found[f"product of int4, {rows} rows, groups of {size}" + (", zeros" if zeros else "")]["wide_weights"] == 0
        )
