"""The OpenAI API: completions and chat, whole or streamed, responses, and the models.

    POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/ID; `responses` has its own paths

    app.py            the paths
    fields.py         which fields are read, refused or ignored
    request.py        what bodies of both APIs have in common
    completions.py    /v1/completions: requests and outputs
      prompts.py      its prompts: texts or token ids, one or several
    chat.py           /v1/chat/completions: requests
      chat_messages.py  its messages
      tools.py        its tools, and what it says of calling them
      chat_output.py  its outputs: text, thoughts, calls
    output_format.py  what an output may look like
    logprobs.py       log probabilities, in the forms of the two APIs
      prompt_logprobs.py  those of the tokens of a prompt, in the form of vLLM
    outputs.py        the prompts of a request and their outputs, while they come
    answer.py         the answer, whole or as events
    usage.py          what it cost
    diagnosis.py      why a prompt did not reuse the pages of an earlier one
    models.py         the models, for OpenAI clients and for those of the contract
    openapi.py, models_openapi.py  the description of the paths

    body ─▶ CompletionRequest ─┐ prompts                 parts              ┌─▶ choices, at the end
            ChatRequest       ─┴────────▶ run_prompts ─────────▶ Output ────┴─▶ JSON of chunks

Each prompt becomes a context that is created, filled, continued and closed (`http/generation.py`). What prompts have in
common is computed once all the same, because the server shares pages.

A field that would change an answer, or what becomes of it, and that is not supported gives 400 with its name if it asks
for something. A field that only says who asks, or helps a cache, is ignored. So is an unknown field, as clients of this
API expect; its name is logged once. Without `max_tokens` an output has up to the model's own default of tokens, not 16.
"""
