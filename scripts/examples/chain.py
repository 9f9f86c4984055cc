#!/usr/bin/env python3
"""A chain as a program: each call goes on from the output of the one before, and only the last is asked for.

scripts/examples/chain.py [HOST:PORT]
"""

import argparse

import jaxctx
from jaxctx import Input, Output, semantic

STEPS = ("A function to add two numbers", "Its test", "Its documentation")
FEW = Output(max_tokens=32)


@semantic
def go_on(before: Input, step: Input, after: Output = FEW) -> None:
    """{{before}}
    # {{step}}
    {{after}}"""


def main(target: str) -> None:
    with jaxctx.Client(target) as client, client.create_session() as session:
        text = session.create_variable("task", text="def add(a, b):")
        for step in STEPS:
            text = go_on(session, before=text, step=step).output
        for part in text.read():
            print(part, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    main(parser.parse_args().target)
