#!/usr/bin/env python3
"""Map-reduce as a program: four questions about one text, answered together, and a summary of the answers.

    scripts/examples/map_reduce.py [HOST:PORT]

Everything is submitted before anything runs. Asking for the summary runs the four calls that it needs as one group,
over one copy of the text's KV, and then the summary; no answer travels to the client in between.
"""

import sys
from typing import Any

import grpc

from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub

TEXT = '''def read_settings(path):
    """Read settings from a JSON file, with defaults for what is missing."""
    with open(path) as file:
        return DEFAULTS | json.load(file)
'''
QUESTIONS = ("what it reads", "what it returns", "what may go wrong", "how to test it")


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        programs = SessionServiceStub(channel)
        session_id = programs.CreateSession(pb.CreateSessionRequest()).session.session_id

        def call(template: str, **places: dict[str, Any]) -> str:
            """Submit a call; the id of its output."""
            parameters = [pb.Parameter(name=name, **place) for name, place in places.items()]
            request = pb.SubmitCallRequest(session_id=session_id, template=template, parameters=parameters)
            return programs.SubmitCall(request).outputs[0].variable_id

        line = {"output": pb.CallOutput(max_tokens=24, stop=["\n"])}
        answers = [call(TEXT + "# {{question}}:{{answer}}", question={"text": each}, answer=line) for each in QUESTIONS]
        places = "".join(f"# {question}:{{{{a{n}}}}}\n" for n, question in enumerate(QUESTIONS))
        inputs = {f"a{n}": {"variable_id": answer} for n, answer in enumerate(answers)}
        summary = call(places + "# in short:{{summary}}", **inputs, summary=line)

        request = pb.ReadVariableRequest(session_id=session_id, variable_id=summary)
        print("in short:", "".join(part.text for part in programs.ReadVariable(request)))
        for task in programs.GetGraph(pb.GetGraphRequest(session_id=session_id)).tasks:
            print(f"{pb.Phase.Name(task.phase)} on {task.engine_id}: {task.why}")
        programs.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
