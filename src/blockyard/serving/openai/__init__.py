"""OpenAI's requests and answers, and vLLM's where OpenAI has none, without a server around them.

Read it in this order:

    unsupported_fields    fields that are not acted on: harmless ones dropped, the others refused by name
    refusals              what is wrong with a request, in a client's words
    fields, messages      what the objects of requests have in common; the messages of a chat
    protocol              requests that generate
    logprobs, responses   their answers, whole and in pieces
    tokenizing            /tokenize and /detokenize
"""
