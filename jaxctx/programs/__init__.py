"""Apps: programs of many calls. Texts that are not there yet, what makes them, and which engine computes what.

    variables.py   a text that is set once, and may be waited for, streamed or polled
    template.py    a prompt with places for texts: what a semantic call is made of
    calls.py       semantic calls: tasks that continue one sequence
    native.py      native steps: functions of texts, on threads of the server's own
    graph.py       which task makes which variable; who asked, how urgently, and which tasks form a group
    engines.py     the engines there are: whether they live, what they hold, how much room they have
    dispatcher.py  which engine a ready task goes to, and why
    execution.py   one task on one engine: contexts, tokens, and what to do if the engine is lost
    sessions.py    a tenant's namespaces of variables, and all of the above wired together

    submit ──▶ graph ──asked for, inputs set──▶ queue ──dispatcher──▶ engine ──tokens──▶ variable ──▶ graph

Nothing runs that nobody asked for. Everything lives on one event loop and waits for nothing but engines, which it sees
through the Engine interface alone: it knows no doors, pages or devices.
"""
