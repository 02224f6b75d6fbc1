"""The endpoints: which body goes where, and who answers."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from chairlift.server.chat import prepare_chat, turn_of
from chairlift.server.completions import prepare_completion
from chairlift.server.errors import ApiError, json_response
from chairlift.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from chairlift.server.responses import ResponsesBody, prepare_response
from chairlift.server.service import Service


def api_router(service: Service) -> APIRouter:
    """All of the OpenAI routes and their relatives; a request is compared with one after the other, so what comes
    most often comes first."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        service.check_model(body.model)
        return await service.answer(request, prepare_completion, body)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The next turn of a conversation."""
        service.check_model(body.model)
        return await service.answer(request, prepare_chat, body)

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The next turn of a conversation, as items."""
        service.check_model(body.model)
        return await service.answer(request, prepare_response, body)

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 otherwise."""
        service.check()
        return json_response({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        """What has been counted, for Prometheus; of a dead engine, too."""
        content, content_type = await service.offload(service.metrics.render)
        return Response(content, headers={"content-type": content_type})

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        service.check()
        return json_response({"object": "list", "data": [_card(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same, by name."""
        service.check()
        service.check_model(name)
        return json_response(_card(service))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a prompt, or of messages by the chat template."""
        service.check()
        service.check_model(body.model)
        tokens = await service.offload(partial(_tokenize, service, body))
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_length})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What a client needs who has no tokenizer of his own and asks /tokenize and /detokenize instead."""
        service.check()
        return json_response(_tokenizer_info(service))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        service.check()
        service.check_model(body.model)
        return json_response({"prompt": await service.offload(partial(_detokenize, service, body.tokens))})

    return router


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "max_model_len": service.max_model_length,
    }


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """Special tokens as text and the chat template; null for what there is not."""
    tokenizer = service.tokenizer
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.max_model_length,
        **{name: getattr(tokenizer, name, None) for name in names},
        "chat_template": service.chat_format.template or None,
    }


def _tokenize(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return service.encode(body.prompt, body.add_special_tokens)
    return turn_of(
        service,
        [message.plain() for message in body.messages or ()],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    ).prompt_ids


def _detokenize(service: Service, tokens: list[int]) -> str:
    size = len(service.tokenizer)
    if bad := [token for token in tokens if not 0 <= token < size]:
        raise ApiError(400, f"tokens holds {bad[0]}, outside the tokenizer's vocabulary 0..{size - 1}", param="tokens")
    return service.vocabulary(skip_special_tokens=False).decode(tokens)
