"""The engine: the loop that turns contexts with work into ragged steps on a device.

    interface.py  what frontends and programs see of an engine: the Engine protocol
    engine.py     `LocalEngine`: that protocol in this process
    remote.py     what programs need of it, of an engine in another process
    factory.py    from a loaded model to a running engine
    config.py     sizes and settings, and the clocks and random sources that tests replace
    attention.py  what may compute attention, and the reasons
    core/         the engine core and its step loop: requests in, steps out, results booked; output streams
    scheduler/    which request runs, which rows the next step has, who gives up pages
    grammar/      formats of outputs: reads grammars, and says which tokens may come next
    runner/       the arrays and executables, the step function, page moves between device, host memory and disk;
                  the check of kernels on the device (runner/check/)
    plan/         what an engine takes on chips that need not be there
    contexts/     operations on contexts that compute nothing, their lifecycle, quotas and change notifications
    snapshots/    saving and opening beside the steps, publications

It takes validated requests and knows nothing of gRPC, HTTP, or how many engines there are.
"""
