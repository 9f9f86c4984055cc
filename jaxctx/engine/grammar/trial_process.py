"""A process that compiles grammars which may be hostile. Run by `trial.py`, as a script; it imports nothing of ours.

A grammar of some kilobytes can overflow the stack, take all memory or never be done: that ends this process, and not
the server. Messages are lines of JSON. The first one has the tokenizer and the limits, and is answered by {}:

    {"tokenizer": str, "eos_ids": [int], "limits": {...}}

Every other one is a grammar, and is answered by {"error": str}, empty if it compiles and has a first mask:

    {"grammar": str}
"""

import json
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance

STACK_BYTES = 1 << 20  # less than any thread of the server has
MEMORY_BYTES = 4 << 30  # of addresses
CPU_S = 10  # for one grammar, in case that nobody is left to end this process


def main() -> None:
    """Answer messages until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # elsewhere than on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, this process is ended first
    setup = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(setup["tokenizer"], eos_token=setup["eos_ids"])
    limits = llguidance.LLParserLimits(**setup["limits"])
    _answer({})
    for line in sys.stdin:
        used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + CPU_S, resource.RLIM_INFINITY))
        _answer({"error": _try(tokenizer, json.loads(line)["grammar"], limits)})


def _try(tokenizer: llguidance.LLTokenizer, grammar: str, limits: llguidance.LLParserLimits) -> str:
    """What is wrong with the grammar; empty: nothing."""
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(compile_error(tokenizer, grammar, limits)))
    thread.start()
    thread.join()
    return errors[0] if errors else "it cannot be read"  # the thread ended by a panic


def compile_error(tokenizer: llguidance.LLTokenizer, grammar: str, limits: llguidance.LLParserLimits) -> str:
    """The error of compiling a grammar and computing its first mask; empty if there is none."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    is_read = not matcher.is_error()
    if is_read:
        matcher.compute_bitmask()
    if matcher.stop_reason() == "NoExtensionBias" or (matcher.is_stopped() and not matcher.is_accepting()):
        return matcher.get_error() if not is_read else "it matches no text"
    if matcher.is_error():
        return matcher.get_error() or "it cannot be read"
    matcher.deep_copy()
    return ""


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    main()
