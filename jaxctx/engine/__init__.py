"""Engine: the loop that turns contexts with work into ragged steps on a device.

    interface.py   what doors see: requests, answers, the Engine protocol
    local.py       that protocol in process, each method a command to the step thread   snapshots.py: what is kept
    remote.py      what programs need of it, of an engine in another process
    loop.py        the step thread, its inbox, and the thread that waits for the device
    mail.py        futures and streams between the step thread and asyncio
    core.py        the engine without threads: requests in, steps out, results booked
    operations.py  what changes contexts without computing: fork, rewind, reserve, …   archive.py: of what is kept
    lifecycle.py       contexts from birth to end: time to live, pins, word of changes   watch.py
    scheduler.py   who runs: admission, memory, preemption, the next batch   budget.py, sequence.py
    batch.py       a batch's rows written into a step's inputs   drafts.py, passes.py: guessed tokens, explicit ones
    step.py        the jitted step: model, paged KV, sampling; page moves
    device.py      the arrays, and every executable compiled before ready
    transfers.py   the cache's page moves carried out, to host memory and disk and back
    output.py      tokens to text and stop conditions
    config.py      sizes   targets.py: what they take on a chip, and how many pages fit
    assembly.py    `open_engine`

It takes validated requests and knows nothing of gRPC, HTTP, or how many engines there are.
"""
