"""The web page at /: contexts and their pages, load, sessions, and a box to try a prompt.

    routes.py     the paths
    shell.py      GET /: the page without data, with its content security policy
    static/       its style sheet and scripts, which are plain files; nothing from elsewhere is loaded
    events.py     GET /page/events: all that the page shows, as it changes
    feed.py       the contexts of one open page, and which changes it has not been sent yet
    as_json.py    contexts, pages, engines and sessions as the page's scripts read them
    prompt.py     POST /page/prompt: continue a context, a fork of one or a new one, and stream what comes
    context.py    GET and DELETE /page/context/{context_id}: the text of a context; its end

The page holds no data itself, so that it needs no key. Its scripts call these paths with the key that its user types,
and each path is admitted as the method of the contract that it stands for: nobody sees another tenant's contexts, and
only a key of role admin sees the engines.
"""
