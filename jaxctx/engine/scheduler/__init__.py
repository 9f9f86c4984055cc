"""The scheduler: which requests run, which rows the next step has, and what a finished step changes.

    scheduler.py         Scheduler: submit, schedule, process_output
    scheduler_output.py  its decisions as data: batch, scheduled requests, events
    active_requests.py   requests that have not ended, waiting and running
    queue.py             the order of those that wait
    admission.py         who begins to run, and what gives way for that
    restore.py           pages that come back from other tiers before a request computes
    page_budget.py       pages that may still be given away
    deadlines.py         requests that cannot be in time
    forecast.py          how long requests take, by what steps took
    drafts.py            guessed tokens in rows that would be padding
    prompt_lookup.py     where guesses come from

Called by the engine core, on the step thread. It never touches the device and calls nobody back.
"""
