#!/usr/bin/env python3
"""Agents that review, as a program: one writes, three look at it for one thing each, one puts together what they say.

    scripts/examples/review.py [HOST:PORT]

The reviewers' calls feed one call, so that they run together, as a group. On a core with several engines
(`jaxctx-serve --role core`) the last lines tell which engine took which part, and why.
"""

import sys
from typing import Any

import grpc

from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub

TASK = "def parse_duration(text):"
REVIEWERS = {"tester": "a test that fails", "reader": "what is hard to read", "user": "what a user would miss"}


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        programs = SessionServiceStub(channel)
        session_id = programs.CreateSession(pb.CreateSessionRequest()).session.session_id

        def call(template: str, **places: dict[str, Any]) -> str:
            """Submit a call; the id of its output."""
            parameters = [pb.Parameter(name=name, **place) for name, place in places.items()]
            request = pb.SubmitCallRequest(session_id=session_id, template=template, parameters=parameters)
            return programs.SubmitCall(request).outputs[0].variable_id

        def agent(name: str, says: str, **inputs: str) -> str:
            """What an agent says; inputs are variables."""
            given = {each: {"variable_id": variable} for each, variable in inputs.items()}
            said = {"output": pb.CallOutput(max_tokens=32, sampling={"temperature": 0.7})}
            return call(f"{says}\n# {name}:{{{{said}}}}", **given, said=said)

        code = agent("author", TASK)
        remarks = {name: agent(name, f"{TASK}{{{{code}}}}\n# {about}", code=code) for name, about in REVIEWERS.items()}
        places = "".join(f"# {name}: {{{{{name}}}}}\n" for name in remarks)
        verdict = agent("editor", places + TASK, **remarks)

        request = pb.ReadVariableRequest(session_id=session_id, variable_id=verdict)
        print("editor:", "".join(part.text for part in programs.ReadVariable(request)))
        for name, variable in {"author": code, **remarks}.items():
            wanted = pb.GetVariableRequest(session_id=session_id, variable_id=variable)
            print(f"{name}:", programs.GetVariable(wanted).variable.text)
        for task in programs.GetGraph(pb.GetGraphRequest(session_id=session_id)).tasks:
            print(f"{pb.Phase.Name(task.phase)} on {task.engine_id}: {task.why}")
        programs.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
