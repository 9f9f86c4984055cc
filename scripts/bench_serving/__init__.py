"""Benchmarks of serving: our server against another in one run. Started by `scripts/bench`.

load.py      the scenarios, as requests to a `Target`, and what is measured
targets.py   such targets: ours through gRPC, a peer through the OpenAI API
servers.py   starting and stopping servers
report.py    medians, spreads and ratios as table, JSON and picture
command.py   the command line and the rounds
"""
