"""What is read out of machine code, from excerpts of what ptxas and nvdisasm print of the Hopper kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiler_output import sass

MESSAGES = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend_unit_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for attend_unit_mosaic_gpu_kernel
    224 bytes stack frame, 220 bytes spill stores, 216 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compile time = 201.462 ms
"""

# A loop that waits for a barrier, multiplies, jumps over something and goes back; the waiting is moved behind the code.
CONSUMER = """\
attend_unit_mosaic_gpu_kernel:
.text.attend_unit_mosaic_gpu_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P2 BRA `(.L_x_11) ;
.L_x_15:
        /*2d40*/                   USHF.R.S32.HI UR12, URZ, 0x1f, UR11 ;
        /*2d90*/                   SHF.R.U32.HI R24, RZ, UR50, R12 ;
.L_x_60:
        /*2dd0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR12], R24 ;
        /*2de0*/              @!P2 BRA `(.L_x_12) ;
.L_x_19:
        /*2f30*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
        /*3120*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR40], R24, gsb0 ;
        /*3130*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_61:
        /*34f0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR18], RZ ;
        /*3510*/                   BAR.SYNC.DEFER_BLOCKING R11, 0x80 ;
        /*3840*/                   MUFU.EX2 R25, R25 ;
        /*4700*/              @!P2 BRA `(.L_x_14) ;
        /*4740*/                   LDSM.16.M88.4 R32, [R53+0x18000] ;
        /*4760*/                   LDSM.16.M88.4 R28, [R53+0x18800] ;
.L_x_14:
        /*5500*/                   FFMA R147, R214, R147, R182 ;
        /*5cf0*/               @P2 BRA `(.L_x_15) ;
.L_x_11:
        /*6220*/                   EXIT ;
.L_x_12:
        /*6350*/                   IMAD.U32 R25, RZ, RZ, UR12 ;
.L_x_67:
        /*6360*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R25+URZ], R24 ;
        /*6370*/              @!P2 NANOSLEEP.SYNCS 0x989680 ;
        /*6380*/              @!P2 SYNCS.PHASECHK.TRANS64 P2, [R25+URZ], R24 ;
        /*6390*/              @!P2 BRA `(.L_x_12) ;
        /*63a0*/                   BRA `(.L_x_19) ;
.L_x_21:
        /*6410*/                   BRA `(.L_x_21);
        /*6420*/                   NOP;
.L_x_72:
"""

# A loop in a loop; the inner one copies.
PRODUCER = """\
.L_x_7:
        /*0c00*/                   LDG.E R10, desc[UR58][R12.64] ;
.L_x_6:
        /*0eb0*/                   S2UR UR41, SR_CTAID.X ;
        /*1000*/              @P1 UTMALDG.4D [UR40], [UR16] ;
        /*1010*/              @P1 UTMALDG.4D [UR32], [UR16] ;
        /*1a60*/               @P0 BRA `(.L_x_6) ;
        /*1aa0*/               @P0 BRA `(.L_x_7) ;
        /*1ab0*/                   EXIT ;
"""


def test_registers_and_spills() -> None:
    assert sass.parse_resources(MESSAGES) == (168, 436)
    with pytest.raises(ValueError, match="names no registers"):
        sass.parse_resources("ptxas fatal   : Unresolved extern function")


def test_instructions() -> None:
    instructions = sass.parse_instructions(CONSUMER)
    assert len(instructions) == 25  # padding is none
    (product, _) = (i for i in instructions if i.name == "HGMMA")
    assert (product.address, product.modifiers, product.is_predicated) == (0x2F30, ".64x64x16.F32.BF16", False)
    assert product.labels == (".L_x_19",)
    back = next(i for i in instructions if i.address == 0x5CF0)
    assert (back.name, back.target, back.is_predicated) == ("BRA", ".L_x_15", True)


def test_a_loop_is_counted_without_its_waiting() -> None:
    (loop,) = sass.hot_loops(sass.parse_instructions(CONSUMER))
    assert (loop.begin, loop.end) == (0x2D40, 0x5CF0)
    assert loop.counts["LDSM"] == loop.products == 2
    assert loop.barriers == 3  # a wait, an arrival and a BAR; not those that wait again
    assert loop.copies == 0
    assert loop.instructions == 15 + 1  # with the jump back from where waiting has moved to
    assert loop.shortest == 13  # without what is jumped over


def test_only_the_innermost_loop_is_hot() -> None:
    (loop,) = sass.hot_loops(sass.parse_instructions(PRODUCER))
    assert (loop.begin, loop.end) == (0xEB0, 0x1A60)
    assert loop.copies == 2
    assert loop.shortest == loop.instructions == 4


def test_code_without_loops() -> None:
    assert sass.hot_loops(sass.parse_instructions("        /*0000*/                   EXIT ;\n")) == ()


def test_shared_memory(tmp_path: Path) -> None:
    resources = tmp_path / "attend_unit_0.resources.txt"
    resources.write_text("Resources(smem_scratch_bytes=182272, tmem_scratch_cols=0)\n")
    assert sass.shared_bytes(resources) == 182272
    resources.write_text("Resources()")
    with pytest.raises(ValueError, match="smem_scratch_bytes"):
        sass.shared_bytes(resources)


def test_a_kernel_that_was_not_shown(tmp_path: Path) -> None:
    tools = sass.Tools(tmp_path, tmp_path, {})
    with pytest.raises(LookupError, match="showed 0 kernels attend_unit"):
        sass.read_kernel(tmp_path, "attend_unit", tools)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "PACKAGES", {"ptxas": "no-such-package"})
    with pytest.raises(sass.MissingTools, match="pip install --no-deps no-such-package"):
        sass.find_tools()
