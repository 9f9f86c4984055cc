#!/usr/bin/env python3
"""A chain as a program: each call goes on from the output of the one before, and only the last is asked for.

scripts/examples/chain.py [HOST:PORT]
"""

import sys

import grpc

from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub

STEPS = ("A function to add two numbers", "Its test", "Its documentation")


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        programs = SessionServiceStub(channel)
        session_id = programs.CreateSession(pb.CreateSessionRequest()).session.session_id
        request = pb.CreateVariableRequest(session_id=session_id, name="task", text="def add(a, b):")
        variables = [programs.CreateVariable(request).variable.variable_id]
        for step in STEPS:
            parameters = [
                pb.Parameter(name="before", variable_id=variables[-1]),
                pb.Parameter(name="after", output=pb.CallOutput(max_tokens=32)),
            ]
            call = pb.SubmitCallRequest(
                session_id=session_id, template="{{before}}\n# " + step + "\n{{after}}", parameters=parameters
            )
            variables.append(programs.SubmitCall(call).outputs[0].variable_id)
        for part in programs.ReadVariable(pb.ReadVariableRequest(session_id=session_id, variable_id=variables[-1])):
            print(part.text, end="", flush=True)
        print()
        programs.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
