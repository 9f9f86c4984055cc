"""The Anthropic API: POST /v1/messages and POST /v1/messages/count_tokens.

    app.py          the paths
    request.py      a JSON body to what it asks for
    prompt.py       system text, messages and tools as the chat template reads them
    messages.py     the answer, whole or as events
    count_tokens.py tokens of a prompt, without an answer
    output.py       the content blocks of an answer, and the events that announce them
    diagnosis.py    why tokens of an earlier request were not reused
    errors.py       errors in the form of this API

Prompt caching needs no marks here: every whole page is found again. `cache_control` is read and changes neither the
prompt nor what is cached; `cache_read_input_tokens` and `cache_creation_input_tokens` are counted all the same.
`max_tokens` 0 computes the prompt and answers nothing, so that a later request finds it. The line with which some
clients tell how they bill (`x-anthropic-billing-header`) is left out of the system text: it changes with every request,
and nothing behind it could be reused.
"""
