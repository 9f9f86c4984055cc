#!/usr/bin/env python3
"""Agents that review, as a program: one writes, three look at it for one thing each, one puts together what they say.

    scripts/examples/review.py [HOST:PORT]

The reviewers' calls feed one call, so that they run together, as a group. On a router with several engines
(`jaxctx-serve --role router`) the last lines tell which engine took which part, and why.
"""

import argparse
from typing import Any

import jaxctx
from jaxctx import Output, Variable

TASK = "def parse_duration(text):"
REVIEWERS = {"tester": "a test that fails", "reader": "what is hard to read", "user": "what a user would miss"}


def main(target: str) -> None:
    with jaxctx.Client(target) as client, client.create_session() as session:

        def agent(name: str, says: str, **inputs: Any) -> Variable:
            """What an agent says."""
            said = Output(max_tokens=32, temperature=0.7)
            return session.call(f"{says}\n# {name}:{{{{said}}}}", **inputs, said=said).output

        code = agent("author", TASK)
        remarks: dict[str, Any] = {
            name: agent(name, f"{TASK}{{{{code}}}}\n# {about}", code=code) for name, about in REVIEWERS.items()
        }
        places = "".join(f"# {name}: {{{{{name}}}}}\n" for name in remarks)
        verdict = agent("editor", places + TASK, **remarks)

        print("editor:", verdict.get())
        for name, remark in {"author": code, **remarks}.items():
            print(f"{name}:", remark.get())
        for task in session.graph():
            print(f"{task.phase.value} on {task.engine_id}: {task.why}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    main(parser.parse_args().target)
