"""Requests and responses of OpenAI's API, with vLLM's extensions, independent of the server.

Reading order:

    unsupported_fields    fields without effect: harmless ones are ignored, others refused by name
    request_fields        base classes of requests, and errors for invalid fields
    protocol              requests that generate; chat messages
    responses             their responses, whole and streamed; log probabilities
    tokenizing            /tokenize and /detokenize
    session_hints         /v1/hints and /v1/retain
"""
