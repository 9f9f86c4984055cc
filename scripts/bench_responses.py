#!/usr/bin/env python3
"""Measures how fast a stored response is continued after its server was killed, and a new prompt of equal length.

    scripts/bench_responses.py CHECKPOINT [--tokens 4096] [--rounds 5] [--serve-options "..."]

First a response to a conversation of `--tokens` tokens is made, and its server killed (SIGKILL). Each round starts a
server on the same store, continues the response with a short turn, and kills the server. Before or after that, in turn,
it sends a conversation of as many tokens that the server has never seen. Both are streams, timed from the request to
the first event, which comes with the first token. Prints every round, the medians, the smallest and the largest value.

CHECKPOINT needs a tokenizer with a chat template.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
TIMEOUT_S = 1800
WORDS = ("page", "tree", "prefix", "context", "the", "of", "a", "store", "fork", "is", "and", "token", "cache", "step")
TURN_WORDS = 150  # of one message of a conversation
OUTPUT_TOKENS = 4
NEXT_TURN = "And how does it go on?"


@dataclass(frozen=True)
class Timed:
    """A response that was streamed."""

    first_event_s: float  # from the request on
    response: Json

    @property
    def input_tokens(self) -> int:
        """Tokens of its prompt."""
        return int(self.response["usage"]["input_tokens"])

    @property
    def cached_tokens(self) -> int:
        """Those of them that were not computed."""
        return int(self.response["usage"]["input_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Round:
    """What one round measured."""

    held_tokens: int  # of the response that is continued, with its output
    continued: Timed
    cold: Timed

    @property
    def ratio(self) -> float:
        """How many times faster the continued one reached its first token."""
        return self.cold.first_event_s / self.continued.first_event_s


class Server:
    """A server process."""

    def __init__(self, checkpoint: str, store: Path, options: str) -> None:
        command = [
            str(Path(sys.executable).with_name("jaxctx-serve")),
            checkpoint,
            "--store",
            str(store),
            "--compile-all",
        ]
        command += ["--grpc-port", "0", "--http-port", "0", *shlex.split(options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        banner = ""
        for line in self.process.stdout:
            banner += line
            if line.startswith("ready"):
                break
        found = re.search(r"http://(\S+):(\d+)", banner)
        if found is None:
            raise SystemExit(f"the server tells no HTTP address:\n{banner}")
        self._port = int(found[2])

    def kill(self) -> None:
        """End it at once, as a loss of power would."""
        self.process.kill()
        self.process.communicate()

    def request(self, path: str, body: Json) -> Json:
        """The JSON of an answer."""
        with self._sent(path, body) as response:
            answer: Json = json.loads(response.read())
        return answer

    def stream(self, body: Json) -> Timed:
        """Make a response, streamed."""
        begin = time.perf_counter()
        first_event_s, last = 0.0, b""
        with self._sent("/v1/responses", body | {"stream": True}) as response:
            for line in response:
                if line.startswith(b"data: "):
                    first_event_s = first_event_s or time.perf_counter() - begin
                    last = line
        return Timed(first_event_s, json.loads(last.removeprefix(b"data: "))["response"])

    @contextmanager
    def _sent(self, path: str, body: Json) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status} {response.read().decode()}")
            yield response
        finally:
            connection.close()


def asked(conversation: list[Json]) -> Json:
    """The body of a request that has this conversation as its input."""
    return {"input": conversation, "max_output_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


def counted(server: Server, conversation: list[Json]) -> int:
    """Tokens of the prompt that a conversation is."""
    return int(server.request("/v1/responses/input_tokens", {"input": conversation})["input_tokens"])


def make_conversation(server: Server, seed: str, tokens: int) -> list[Json]:
    """A conversation of random words with `tokens` tokens, up to a few; the last turn is the user's."""
    source = random.Random(seed)
    text = [source.choice(WORDS) for _ in range(tokens)]
    low, high = 1, tokens
    while high - low > 1:  # how many words have that many tokens
        middle = (low + high) // 2
        if counted(server, as_turns(text[:middle])) <= tokens:
            low = middle
        else:
            high = middle
    return as_turns(text[:low])


def as_turns(words: list[str]) -> list[Json]:
    """Words as messages of user and assistant in turn, the user's last."""
    count = max(len(words) // TURN_WORDS, 1) | 1  # odd
    size = -(-len(words) // count)
    parts = [" ".join(words[start : start + size]) for start in range(0, len(words), size)]
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": part} for number, part in enumerate(parts)]
    return turns if turns[-1]["role"] == "user" else [*turns[:-1], turns[-1] | {"role": "user"}]


def keep(settings: argparse.Namespace, store: Path) -> Json:
    """Make the response that is continued, and kill its server."""
    server = Server(settings.checkpoint, store, settings.serve_options)
    try:
        return server.request("/v1/responses", asked(make_conversation(server, "kept", settings.tokens)))
    finally:
        server.kill()


def one_round(settings: argparse.Namespace, store: Path, kept: Json, number: int) -> Round:
    """Start a server, measure once, and kill it."""
    server = Server(settings.checkpoint, store, settings.serve_options)
    try:
        held = int(kept["usage"]["total_tokens"])
        turn = [{"role": "user", "content": f"{NEXT_TURN} {number}"}]
        other = make_conversation(server, f"{number} cold", held + counted(server, turn))
        if number % 2:
            cold = server.stream(asked(other))
        continued = server.stream(asked(turn) | {"previous_response_id": kept["id"]})
        if not number % 2:
            cold = server.stream(asked(other))
    finally:
        server.kill()
    return Round(held, continued, cold)


def spread(values: list[float]) -> str:
    """The median, the smallest and the largest value."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def report(number: int, each: Round) -> None:
    """Print a round."""
    print(
        f"round {number}: held {each.held_tokens}; continued: {each.continued.input_tokens} tokens, "
        f"{each.continued.cached_tokens} cached, {each.continued.first_event_s:.3f} s; "
        f"cold: {each.cold.input_tokens} tokens, {each.cold.cached_tokens} cached, {each.cold.first_event_s:.3f} s; "
        f"{each.ratio:.1f} times faster",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve-options", default="--kv-tokens 16384 --max-context-tokens 8192 --max-batch 4")
    settings = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        kept = keep(settings, store)
        for number in range(settings.rounds):
            rounds.append(one_round(settings, store, kept, number))
            report(number, rounds[-1])
    print(f"n = {len(rounds)}, seconds to the first token: median (smallest to largest)")

    print(f"continued  {spread([each.continued.first_event_s for each in rounds])}")
    print(f"cold       {spread([each.cold.first_event_s for each in rounds])}")
    print(f"ratio      {spread([each.ratio for each in rounds])}")


if __name__ == "__main__":
    main()
