"""POST /tokenize and /detokenize, as vLLM has them: what a prompt is to this server, block by block if asked to."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..jobs.prompts import PromptEncoder
from ..openai.tokenizing import TokenizeFields, parse_detokenize, parse_tokenize, text_of, tokenize_answer
from .api_key import KeyGuard
from .run import Deadline
from .service import Service, within


class TokenizerPaths:
    """What both paths do. block_size: tokens of a block that can be hit."""

    def __init__(self, service: Service, encoder: PromptEncoder, block_size: int) -> None:
        self._service = service
        self._encoder = encoder
        self._block_size = block_size

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to tokens. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_tokenize)
        self._service.require_model(wanted.model)
        return Response(await within(deadline, request, self._encoded(wanted)), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Tokens to text. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_detokenize)
        self._service.require_model(wanted.model)
        return JSONResponse({"prompt": await within(deadline, request, self._decoded(wanted.tokens))})

    def _begin(self) -> Deadline:
        self._service.thread.require_place(0)
        return Deadline(self._service.limits.request_seconds)

    async def _encoded(self, wanted: TokenizeFields) -> bytes:
        prompt = await self._encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
        max_model_len = self._service.planner.max_model_len

        def answer(tokenizer: Any) -> bytes:
            found = tokenize_answer(wanted, prompt.token_ids, tokenizer, max_model_len, self._block_size)
            return json.dumps(found, separators=(",", ":")).encode("ascii")

        # As JSON in the encoder's thread too: a megabyte of text is many megabytes of tokens.
        return await self._encoder.ask(answer)

    async def _decoded(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        prompt = await self._encoder.encode("tokens", token_ids)
        return await self._encoder.ask(lambda tokenizer: text_of(tokenizer, prompt.token_ids))


def tokenizer_routes(service: Service, encoder: PromptEncoder, block_size: int, guard: KeyGuard) -> APIRouter:
    """Both paths, behind the key."""
    router = APIRouter(dependencies=[Depends(guard)])
    paths = TokenizerPaths(service, encoder, block_size)
    router.add_api_route("/tokenize", paths.tokenize, methods=["POST"], response_model=None)
    router.add_api_route("/detokenize", paths.detokenize, methods=["POST"], response_model=None)
    return router
