"""Reading bundles: short excerpts of what libtpu 0.0.52 wrote for a scatter and for a kernel of ours."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compiler_output.bundles import (
    Loop,
    compile_and_count,
    dump_bundles,
    parse_program,
    pool_copies,
    read_programs,
)

# Two loops, one in the other, whose ends are known; a spill in the inner one; empty bundles, which have no depth.
NESTED = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s8230_s15 = smov.u32 [#allocation0] /* materialized constant */ } /* entry bundle: %scatter_fusion */
   0x5   :  { %s8304_s16 = smov.u32 0 /* copy for cssa */ } /* Start region 744 :: Start region 748 :: End region 748 */
   0x6 LB: > { %s8310_s0 = sshll.u32 %s8208_s16, 8  ;;  %s8208_s16 = sphi %s8304_s16, %s15_s16 /* phi copy */ }
   0xb   : > { %27 = sbr.rel (%p6253_p1) target = $region11 }
   0xc   :  {}
   0xd   :  {} /* End region 9 */
  0x1b PF: > { %s38_s6 = scalar_select /*predicate=*/%p8313_p0, /*on_true=*/[#allocation1] }
  0x23 LB: >> { %s11656_s7 = sld [smem:[#allocation45_spill]]  ;;  %s8212_s9 = sphi %s8336_s9, %s51_s9 /* phi copy */ }
  0x24   : >> { %11657 = sst [smem:[#allocation46_spill]] %s8212_s9  ;;  %s8231_s13 = smov.u32 [#allocation5] }
  0x25   : >> { %2398 = vst [vmem:[#allocation53_spill]] %v2398_v52  ;;  %2420 = vst [vmem:[#allocation8] sm:$0xf] }
 0x72c   : >> { %p48_p5 = scmp.ge.s32.totalorder %s51_s9, 16 /* loop exit test */ } /* End region 14 */
 0x72d   : >> { %50 = sbr.rel (!%p48_p5) target = $region742 }
 0x735   : > { %p12_p6 = scmp.ge.s32.totalorder %s15_s16, 2 /* loop exit test */ } /* End region 2 */
 0x736   :  { %14 = sbr.rel (!%p12_p6) target = $region753 }
"""

# Two loops one after the other, whose ends are known only when they run.
IN_A_ROW = """
  0x17   :  { %1208 = sbr.rel (%p1378_p1) target = $region266 }
  0x1c LB: > { %s77_s21 = sld [smem:[#allocation8 + %s1558_s15]]  ;;  %s78_s9 = sadd.s32 64, %s1558_s15 }
  0x37   : > { %s134_s27 = sshrl.u32 %s133_s26, 7  ;;  %76 = sbr.rel (!%p73_p6) target = $region272 }
  0x41 LB: > { %s171_s21 = sadd.s32 8, %s1562_s22  ;;  %s180_s15 = sadd.s32 4294967288, %s1562_s22 }
  0x42   : > { %p167_p8 = scmp.ge.s32.totalorder %s96_s19, %s1031_s9 }
  0x43   : > { %170 = sbr.rel (!%p167_p8) target = $region283 }
  0xb5   :  { %1218 = sbr.rel (%p1300_p10) target = $region288 }
"""

HLO = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(s8[8,2048,64,128]{3,2,1,0:T(32,128)(4,1)}, \
/*index=1*/f32[8,2048,1,64]{1,3,2,0:T(8,128)}, bf16[512,8,128]{2,1,0})->(s8[8,2048,64,128]{3,2,1,0:T(32,128)(4,1)})}
  %copy.1 = bf16[512,8,128]{2,0,1:T(8,128)(2,1)S(1)} copy(%rows.1), sharding={mesh[], [{}, {}, {}]}
  %copy.4 = s8[8,2048,64,128]{3,0,2,1:T(8,128)(4,1)} copy(%pages_values.1), metadata={op_name="pages.values"}
  %fusion.2 = s8[8,2048,64,128]{3,2,1,0:T(32,128)(4,1)} fusion(%copy.4, %rows.1), kind=kCustom, calls=%copy_of
  %copy-start.1 = (f32[8,2048,1,64]{1,3,2,0:T(8,128)S(1)}, f32[8,2048,1,64]{1,3,2,0}, u32[]{:S(2)}) copy-start(%p)
  ROOT %transpose.7 = f32[8,2048,1,64]{1,3,2,0:T(8,128)} transpose(%bitcast.8), dimensions={0,1,2,3}
"""


def test_a_loop_in_a_loop_runs_as_often_as_both_together() -> None:
    program = parse_program("scatter", NESTED.splitlines())
    assert program.loops == (Loop(0x6, 1, 11, 2), Loop(0x23, 2, 5, 16))
    assert program.bundles == 14
    assert program.least_run == 3 + 2 * (6 + 16 * 5)
    assert program.spills == 2


def test_loops_whose_end_is_not_known_count_once() -> None:
    program = parse_program("kernel", IN_A_ROW.splitlines())
    assert program.loops == (Loop(0x1C, 1, 2, None), Loop(0x41, 1, 3, None))
    assert program.bundles == program.least_run == 7
    assert program.spills == 0


def test_programs_are_found_among_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "17-write_rows.1-01-final_bundles.txt").write_text(IN_A_ROW)
    (tmp_path / "17-write_rows.1-00-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:\n")
    (tmp_path / "16-TLP-01-final_bundles.txt").write_text(NESTED)
    (tmp_path / "16-TLP-hlo.txt").write_text("HloModule")
    top, kernel = read_programs(tmp_path)
    assert (top.name, top.bundles, top.is_top_level) == ("TLP", 14, True)
    assert (kernel.name, kernel.bundles, kernel.is_top_level) == ("write_rows.1", 7, False)


def test_copies_of_pools_are_those_of_arguments_of_four_axes() -> None:
    values, start, transposed = pool_copies(HLO)
    assert values.startswith("s8[8,2048,64,128]")
    assert start.startswith("(f32[8,2048,1,64]")
    assert transposed.startswith("f32[8,2048,1,64]")
    with pytest.raises(ValueError, match="entry_computation_layout"):
        pool_copies("HloModule jit_f")


def test_that_nothing_was_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where libtpu was loaded before, or, here, where there is none."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1")
    was_enabled = jax.config.jax_enable_compilation_cache
    try:
        with dump_bundles() as folder:
            assert os.environ["LIBTPU_INIT_ARGS"].startswith(f"--other=1 --xla_jf_dump_to={folder} ")
            left = Path(folder, "1-old-01-final_bundles.txt")
            left.write_text(NESTED)
            with pytest.raises(RuntimeError, match="wrote no bundles"):
                compile_and_count(jax.jit(jnp.sin).lower(1.0), {}, Path(folder))
            assert not left.exists()
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
