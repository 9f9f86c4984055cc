"""The banner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx_server.banner import banner


@pytest.mark.parametrize(("kv_dtype", "warns"), [("float8_e4m3fn", True), ("int8", False), ("bfloat16", False)])
def test_the_banner_warns_of_keys_and_values_that_are_coarse_for_nothing(
    make_engine: Any, kv_dtype: str, warns: bool
) -> None:
    told = banner(replace(make_engine().info, kv_dtype=kv_dtype), ["127.0.0.1:1"], None, None, 1.0)
    assert ("WARNING" in told and "--kv-dtype int8" in told) == warns


def test_it_says_which_types_the_model_has(make_engine: Any) -> None:
    def told(**types: str) -> str:
        return banner(replace(make_engine().info, **types), ["127.0.0.1:1"], None, None, 1.0)

    assert "parameters, bfloat16)" in told(dtype="bfloat16", weights_dtype="bfloat16")
    assert "parameters, bfloat16 with int8 weights)" in told(dtype="bfloat16", weights_dtype="int8")


@pytest.mark.parametrize(
    ("tls", "keys", "lines"),
    [
        (
            None,
            None,
            ["gRPC      h:1", "gRPC      unix:/s", "http://h:2/v1)\n", "none: whoever reaches these addresses"],
        ),
        ("TLS", ["key"], ["gRPC      h:1 (TLS)", "gRPC      unix:/s\n", "http://h:2/v1) (TLS)", "1 accepted"]),
        ("mTLS", None, ["gRPC      h:1 (mTLS)", "none: whoever shows a certificate of --tls-client-ca may do"]),
    ],
)
def test_it_says_what_the_addresses_use(tls: str | None, keys: list[str] | None, lines: list[str]) -> None:
    told = banner(None, ["h:1", "unix:/s"], "http://h:2", keys, 1.0, tls=tls)
    for line in lines:
        assert line in told
    assert "WARNING" not in told


def test_it_says_what_a_checkpoint_has_in_fewer_bits(make_engine: Any) -> None:
    words = "14 matrices of 4-bit integers were made bfloat16"
    assert f"\n  weights   {words}\n" in banner(make_engine().info, ["h:1"], None, None, 1.0, weights=words)
    assert "\n  weights " not in banner(make_engine().info, ["h:1"], None, None, 1.0)


def test_it_says_what_guesses_tokens(make_engine: Any) -> None:
    words = "small (1,000 parameters) guesses up to 15 tokens, with 48 tokens of KV"
    assert f"\n  drafts    {words}\n" in banner(make_engine().info, ["h:1"], None, None, 1.0, draft=words)
    assert "\n  drafts " not in banner(make_engine().info, ["h:1"], None, None, 1.0)


def test_it_warns_where_no_kernel_serves() -> None:
    choice = AttentionChoice("reference", AttentionReason.NO_KERNEL, "it has compute capability 8.0")
    told = banner(None, ["h:1"], None, None, 1.0, attention=choice)
    assert "\n  attention plain JAX\n" in told
    assert "WARNING   attention is computed by plain JAX" in told
    assert "slower than a kernel: it has compute capability 8.0\n" in told
    assert "WARNING" not in banner(None, ["h:1"], None, None, 1.0)


def test_it_says_which_sizes_there_are_and_why(make_engine: Any) -> None:
    sizes, host_tier = (
        "page 64, 256 at once, 2,048 rows a step (defaults of this GPU)",
        "640 tokens in 10 pages (as set)",
    )
    told = banner(make_engine().info, ["h:1"], None, None, 1.0, sizes=sizes, host_tier=host_tier)
    assert f"\n  sizes     {sizes}\n  host tier {host_tier}\n" in told
    assert "host tier" not in banner(make_engine().info, ["h:1"], None, None, 1.0, sizes=sizes)


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (AttentionChoice("gpu", AttentionReason.CHECKED, compared="equal"), "attention gpu kernel, equal"),
        (AttentionChoice("reference", AttentionReason.REQUESTED), "attention plain JAX (--attention reference)"),
        (AttentionChoice("reference", AttentionReason.PLATFORM), "attention plain JAX"),
    ],
)
def test_it_says_what_computes_attention(choice: AttentionChoice, line: str) -> None:
    told = banner(None, ["h:1"], None, None, 1.0, attention=choice)
    assert f"  {line}\n" in told
    assert "WARNING" not in told


def test_it_warns_of_keys_that_others_can_read() -> None:
    told = banner(None, ["h:1"], None, ["key"], 1.0, is_readable=True)
    assert "WARNING   without TLS keys, prompts and outputs travel as plain text" in told
    assert "--tls-cert" in told
