"""A chat in the terminal with a running server, through OpenAI's own client.

    blockyard serve                                   in one terminal
    python examples/chat_client.py                    in another
    python examples/chat_client.py "One question."    for a single answer

The server caches the blocks of the conversation, so each turn computes little more than its new tokens. The number of
cached tokens is printed after each answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any


def questions(first: str | None) -> Iterator[str]:
    """Yield the question given on the command line, or else each question typed until Ctrl-D."""
    if first is not None:
        yield first
        return
    print("Ask something; Ctrl-D ends the chat.")
    while line := sys.stdin.readline():
        if line.strip():
            yield line.strip()


def answer(client: Any, model: str, messages: list[dict[str, str]]) -> str:
    """Print an answer while it arrives, and return it."""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=200,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = ""
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            print(piece, end="", flush=True)
            text += piece
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} of them cached]")
    return text


def chat(client: Any, first: str | None) -> None:
    """Answer questions, each with the conversation before it."""
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a helpful assistant. Answer briefly."}]
    for question in questions(first):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(client, model, messages)})


def main() -> None:
    """Chat until the questions end, or until the server fails."""
    from openai import APIError, OpenAI

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--address", default="http://127.0.0.1:8000", help="of the server; default: %(default)s")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.address}/v1", api_key=os.environ.get("BLOCKYARD_API_KEY", "none"))
    try:
        chat(client, options.question)
    except APIError as error:
        sys.exit(f"chat_client: {options.address}: {error} Is `blockyard serve` running there?")


if __name__ == "__main__":
    main()
