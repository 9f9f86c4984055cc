"""Paths that clients of other servers know and this server does not have: why they are not there.

A server that answered them with something would be worse than one that says no: 404, as for any path that is not there,
with a message that says so.
"""

UNSUPPORTED: dict[str, str] = {  # by the path, or the beginning of it up to a "/"
    "/v1/embeddings": "embeddings are not supported: the models here generate text",
    "/v1/audio": "audio is not supported",
    "/v1/images": "images are not supported",
    "/v1/videos": "videos are not supported",
    "/v1/moderations": "moderations are not supported",
    "/v1/files": "files are not supported",
    "/v1/uploads": "files are not supported",
    "/v1/batches": "batches are not supported: send the requests as they are, the server batches them",
    "/v1/rerank": "reranking is not supported",
    "/v2/rerank": "reranking is not supported",
    "/rerank": "reranking is not supported",
    "/v1/score": "scoring pairs is not supported; /v1/completions has `echo` with `logprobs`",
    "/score": "scoring pairs is not supported; /v1/completions has `echo` with `logprobs`",
    "/pooling": "pooling is not supported",
    "/classify": "classification is not supported",
    "/v1/fine_tuning": "fine-tuning is not supported",
    "/v1/assistants": "assistants are not supported; /v1/responses keeps conversations",
    "/v1/threads": "threads are not supported; /v1/conversations keeps conversations",
    "/v1/vector_stores": "vector stores are not supported",
    "/v1/realtime": "the realtime API is not supported",
    "/v1/complete": "text completions in this form are not supported; /v1/messages is",
    "/invocations": "this path of another service is not supported",
}


def why_unsupported(path: str) -> str | None:
    """Why there is no such path, if it is one that clients of other servers know; None for any other."""
    parts = path.rstrip("/").split("/")
    for count in range(len(parts), 1, -1):
        if (why := UNSUPPORTED.get("/".join(parts[:count]))) is not None:
            return why
    return None
