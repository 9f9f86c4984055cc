"""What the first and a second signal do. `test_cli` has the same through an event loop."""

from jaxctx_server.signals import SAME_SIGNAL_S, StopSignals


def test_the_first_signal_stops_and_only_a_later_one_ends() -> None:
    calls: list[str] = []
    now = 100.0
    signals = StopSignals(stop=lambda: calls.append("stop"), end_now=lambda: calls.append("end"), clock=lambda: now)
    signals.handle()
    now += SAME_SIGNAL_S / 2
    signals.handle(15, None)  # the signal of the process group
    assert calls == ["stop", "stop"]
    now += SAME_SIGNAL_S
    signals.handle()
    assert calls == ["stop", "stop", "end", "stop"]
