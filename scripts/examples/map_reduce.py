#!/usr/bin/env python3
"""Map-reduce as a program: four questions about one text, answered together, and a summary of the answers.

    scripts/examples/map_reduce.py [HOST:PORT]

Everything is submitted before anything runs. Asking for the summary runs the four calls that it needs as one group,
over one copy of the text's KV, and then the summary; no answer travels to the client in between.
"""

import argparse
from typing import Any

import jaxctx
from jaxctx import Output

TEXT = '''def read_settings(path):
    """Read settings from a JSON file, with defaults for what is missing."""
    with open(path) as file:
        return DEFAULTS | json.load(file)
'''
QUESTIONS = ("what it reads", "what it returns", "what may go wrong", "how to test it")


def main(target: str) -> None:
    with jaxctx.Client(target) as client, client.create_session() as session:
        line = Output(max_tokens=24, stop="\n")
        answers = [session.call(TEXT + "# {{question}}:{{answer}}", question=each, answer=line) for each in QUESTIONS]
        places = "".join(f"# {question}:{{{{a{n}}}}}\n" for n, question in enumerate(QUESTIONS))
        inputs: dict[str, Any] = {f"a{n}": answer for n, answer in enumerate(answers)}
        summary = session.call(places + "# in short:{{summary}}", **inputs, summary=line)

        print("in short:", summary.output.get())
        for task in session.graph():
            print(f"{task.phase.value} on {task.engine_id}: {task.why}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    main(parser.parse_args().target)
