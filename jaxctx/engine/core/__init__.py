"""The engine core: requests on their way through the engine, the step loop that drives them, and their output.

engine_core.py    EngineCore: carries out what the scheduler decides, books the results of steps
step_loop.py      StepLoop: the core on its own thread, with an inbox of commands
request.py        Request: one call and its progress
forward_pass.py   samplers, and what a forward call asks about its tokens
output.py         the text of an output, and when it ends
output_stream.py  results on their way to asyncio, and backpressure
"""
