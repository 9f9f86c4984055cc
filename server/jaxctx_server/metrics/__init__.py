"""Metrics of one server, for Prometheus. Nothing here is global: every server has a `ServerMetrics` of its own.

    table            every metric that there is: name, type, labels, meaning
    histogram        counts by size
    calls            calls by method, transport and status code: counted by the call pipeline
    generations      first tokens, gaps between tokens, ends of outputs: counted by the services
    engines          what an engine counts itself, read when somebody asks
    vllm             the same numbers under the names that balancers know
    server_metrics   all of them as text

Labels come from closed sets. Tenants, keys, contexts and sessions are never labels.
"""
