"""OpenAI's requests and answers, without a server around them.

Read it in this order:

    unsupported_fields    fields that are not acted on: harmless ones dropped, the others refused by name
    refusals              what is wrong with a request, in a client's words
    protocol              the fields of a request that are acted on
    logprobs, responses   answers, whole and in pieces
"""
