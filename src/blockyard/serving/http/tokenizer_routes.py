"""POST /tokenize and /detokenize, as vLLM has them: what a prompt is to this server, block by block if asked to."""

from __future__ import annotations

import json

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..jobs.prompts import PromptEncoder
from ..openai.tokenizing import TokenizeFields, parse_detokenize, parse_tokenize, text_of, tokenize_answer
from .api_key import KeyGuard
from .deadline import Deadline
from .service import Service, within


def tokenizer_routes(service: Service, encoder: PromptEncoder, block_size: int, guard: KeyGuard) -> APIRouter:
    """Both paths, behind the key. block_size: tokens of a block that can be hit."""
    router = APIRouter(dependencies=[Depends(guard)])
    max_model_len = service.planner.max_model_len

    async def encoded(wanted: TokenizeFields) -> bytes:
        prompt = await encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
        # As JSON in the encoder's thread too: a megabyte of text is many megabytes of tokens.
        return await encoder.ask(
            lambda tokenizer: json.dumps(
                tokenize_answer(wanted, prompt.token_ids, tokenizer, max_model_len, block_size), separators=(",", ":")
            ).encode("ascii")
        )

    async def decoded(token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        prompt = await encoder.encode("tokens", token_ids)
        return await encoder.ask(lambda tokenizer: text_of(tokenizer, prompt.token_ids))

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        deadline = Deadline(service.limits.request_seconds)
        service.thread.require_place(0)
        wanted = await service.read(request, parse_tokenize)
        service.require_model(wanted.model)
        return Response(await within(deadline, request, encoded(wanted)), media_type="application/json")

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        deadline = Deadline(service.limits.request_seconds)
        service.thread.require_place(0)
        wanted = await service.read(request, parse_detokenize)
        service.require_model(wanted.model)
        return JSONResponse({"prompt": await within(deadline, request, decoded(wanted.tokens))})

    return router
