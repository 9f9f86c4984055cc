"""The OpenAI API: completions and chat, whole or streamed, for programs that use no other API.

    POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/ID

    app.py          the paths
    completions.py  prompts as text or token ids; the form of their answers
    chat.py         messages; the form of their answers
    fields.py       which fields are read, refused or ignored
    request.py      a JSON body to the messages of the calls that it needs
    generation.py   the calls, and the answer whole or as events
    models.py       the models, for OpenAI clients and for those of the contract
    errors.py       errors of the gRPC server in the names of this API

A request becomes a context that is created, filled, continued and closed. What prompts have in common is computed once
all the same, because the server shares pages. Contexts by themselves (kept, forked, saved) are not in this API.

Fields: `model`, `prompt` (text or token ids) or `messages` (their text), `max_tokens` or `max_completion_tokens`, `n`,
`stop`, `seed`, `stream`, `stream_options`, `temperature`, `top_p`, `presence_penalty`, `frequency_penalty` and
`logit_bias`; and as other servers have them `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`stop_token_ids`, `include_stop_str_in_output` and `cache_salt`. A field that would change an answer, or what becomes of
it, and that is not supported gives 400 with its name if it asks for something. A field that only says who asks, or
helps a cache, is ignored. So is an unknown field, as clients of this API expect; its name is logged once. Without
`max_tokens` an output has up to the model's own default of tokens, not 16.
"""
