"""HTTP in the server: the OpenAI API, programs, operations, and the page.

    server.py         the application on one address, in the event loop of the process
    app.py            all paths in one Starlette application
    frontend.py       what all requests share
    endpoint.py       a route: admission by the server's pipeline, handler, response; the end when the client leaves
    call.py           one request: its body, its caller, and the calls of services that it needs
    generation.py     one prompt and its outputs: the calls that every API of text needs
    interleave.py     several prompts or questions at once
    events.py         server-sent events
    errors.py         errors as JSON with an HTTP status, in the form of each API
    field_names.py    fields in errors, as the request named them
    tools.py          tools of a request, for every API that has them
    chat_output.py    how a model writes calls of tools and thoughts
    prompt_memory.py  how the last prompts of callers began, to be compared with
    headers.py        headers that are refused
    unrouted.py       unknown paths and methods
    messages.py       request messages of the contract out of paths, queries and bodies; responses as JSON
    limits.py         limits of a connection: how many there are, how long headers and bodies may take
    openapi.py        the description of all paths, merged of those that each package has in its own `openapi.py`
    api_description.py  how a package describes its paths
    message_schemas.py  schemas of the contract's messages
    request_body.py   limits of a body: its type, its size, how much JSON it holds
    openai/           /v1/completions, /v1/chat/completions, /v1/models
    decisions/        /v1/decisions
    contextcache/     /v1/context, and the headers that continue what is kept there
    programs/         sessions, variables, calls and graphs
    ops/              /health, /livez, /readyz, /version, /tokenize, /detokenize, /tokenizer_info, /openapi.json
    page/             the page at /, its files, and the paths that its scripts use

A request becomes calls of the services, which gRPC calls too: keys, roles, rules of fields and limits are the same for
both, in one place each. Nothing here decides anything about a request that is valid.

Texts that are read as they come are server-sent events. The work for a request ends when its client is gone. Up to 512
connections are served; headers have up to 16 KiB and 10 seconds, a body 8 MiB and 30 seconds.
"""
