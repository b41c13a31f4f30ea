"""`phalanx generate`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from phalanx.cli.shared import (
    AsJson,
    Dtype,
    ExecutorOption,
    Interface,
    LoadFormat,
    Model,
    RanksPerNode,
    RayAddress,
    ShareGpus,
    StateDtype,
    Tp,
    told_errors,
)
from phalanx.errors import ConfigError


def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", "-c", help="A user message to answer.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as 1,2,3.")] = None,
    tp: Tp = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "auto",
    load_format: LoadFormat = "auto",
    executor: ExecutorOption = "local",
    ranks_per_node: RanksPerNode = None,
    interface: Interface = None,
    ray_address: RayAddress = None,
    share_gpus: ShareGpus = False,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt and exit."""
    with told_errors():
        if sum(given is not None for given in (prompt, chat, prompt_ids)) != 1:
            raise ConfigError("bad_option", "Give exactly one of --prompt, --chat, --prompt-ids.", "See --help.")
        from phalanx.engine.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        from phalanx.llm import LLM

        with LLM(
            model,
            tp=tp,
            max_model_len=max_model_len,
            dtype=dtype,
            state_dtype=state_dtype,
            load_format=load_format,
            executor=executor,
            ranks_per_node=ranks_per_node,
            interface=interface,
            ray_address=ray_address,
            share_gpus=share_gpus,
        ) as llm:
            if chat is not None:
                question: str | list[int] = llm.encode_chat([{"role": "user", "content": chat}])
            else:
                question = prompt if prompt is not None else _token_ids(prompt_ids or "")
            if as_json or llm.tokenizer is None:
                answer = llm.generate(question, params)
                print(json.dumps(_as_dict(answer)) if as_json else answer.token_ids)
            else:
                for piece in llm.stream(question, params):
                    print(piece, end="", flush=True)
                print()


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("bad_option", f"--prompt-ids is {text!r}.", "Write token ids as 1,2,3.") from None


def _as_dict(answer: Any) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt_token_ids),
        "cached_tokens": answer.cached_tokens,
    }
