"""Programs: graphs of many calls. Texts that do not exist yet, the calls that make them, and which engine runs a call.

    variables.py         a text that is set once, and can be waited for, streamed or polled
    template.py          a prompt with placeholders: what a semantic call is made of
    engine_registry.py   engines: whether they answer, what they hold, how much capacity they have
    tasks.py             semantic calls and their tasks, which continue one sequence
    graph.py             which task makes which variable; which are asked for, how urgently; and groups of tasks
    tenant_queue.py      a tenant's ready tasks, in the order in which they are placed
    dispatcher.py        which engine a ready task goes to, and why
    executor.py          one task on one engine: contexts, tokens, and resuming after the loss of an engine
    native_functions.py  functions of texts, on threads of the server
    step_threads.py      these threads, which tenants share in turn
    sessions.py          a tenant's namespaces of variables; `Programs`, which wires all of the above together

    submit ──▶ graph ──asked for, inputs set──▶ queue ──dispatcher──▶ engine ──tokens──▶ variable ──▶ graph

A task runs only if its output is asked for. Everything runs on one event loop and waits only for engines, which it uses
through the Engine interface alone: it knows no transport, page or device. Called by the server's SessionService.
"""
