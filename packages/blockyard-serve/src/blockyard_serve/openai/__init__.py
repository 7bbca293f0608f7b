"""OpenAI's requests and answers, and vLLM's where OpenAI has none, without a server around them.

Read it in this order:

    unsupported_fields    fields that are not acted on: harmless ones dropped, the others refused by name
    refusals              what is wrong with a request, in a client's words
    fields                what the objects of requests have in common
    protocol              requests that generate; the messages of a chat
    responses             their answers, whole and in pieces; log probabilities
    tokenizing            /tokenize and /detokenize
"""
