"""The model runner: what runs on the device, and how one step is put together for it.

    step.py            the step function: model, paged attention and sampling over one ragged batch
    page_functions.py  functions that copy, read and write whole pages between steps
    compiled_model.py  `CompiledModel`: every function of an engine, described by shapes alone
    model_runner.py    `ModelRunner`: the arrays and the executables
    batch.py           `Batch`: the rows of one step, and how they are written into the step's inputs
    kv_transfer.py     `KVTransfer`: carries out the cache's page moves between device, host memory and disk
    attention_choice.py  what computes attention: the device's kernel, if the check finds it right, or the reference
    matmul_choice.py   as which type a CPU multiplies weights of 8 bits, as measured there
    check/             the check: kernels against the reference on the device

It knows shapes, slots and page ids. It never decides which request runs or which page is given up. Called by
`engine.core` on the step thread.
"""
