"""From settings to an engine. With `engine_settings`, the only part of the server that knows models and JAX.

    build.py            a model directory to a running engine
    plan.py             what a server takes on chips that need not be there (`jaxctx-serve plan`)
    check.py            kernels and whole steps of this device against the reference (`jaxctx-serve check`)
    served_model.py     the model that settings name: loaded, or only described
    draft_model.py      the draft model: checked, loaded, sized beside the model
    attention.py        what computes attention, checked first
    fitting_sizes.py    sizes that fit, as compilers measure them
    larger_machines.py  the smallest machine that holds what does not fit
    user_errors.py      what the user can correct, as errors that name the setting or the file

Used by `cli` and by the process of `kernel_check`, on a thread of its own, as all of it takes long. What a server does
once its engine runs is no part of it.
"""
