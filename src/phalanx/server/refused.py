"""Fields that would change the answer and that nobody here reads: refused by name, none is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.server.errors import bad_request

_NOT_HERE = "This server has nothing of the kind."
_NO_BEAMS = "Answers are sampled; there is no beam search."
_ELSEWHERE = "Ask /v1/completions or /v1/chat/completions for it."
_ONLY_TEXT = "These models read and write text."
_OTHER_SAMPLER = "Tokens are chosen by temperature, top_k, top_p, min_p, penalties and biases."

REFUSED: Mapping[str, str] = {
    "chat_template": "A chat template in a request would run on the server; it uses the model's own.",
    "suffix": "Text after the answer cannot be given; these models only continue a prompt.",
    "best_of": "Use n: all answers are returned.",
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "prompt_logprobs": _ELSEWHERE,
    "logprob_start_len": "Log-probabilities are told of a whole prompt: prompt_logprobs.",
    "echo": "Only /v1/completions has it.",
    "logprob_token_ids": "Log-probabilities are given of the likeliest tokens: top_logprobs.",
    "prompt_embeds": "Prompts are text or tokens.",
    "logits_processors": "They would run on the server.",
    "custom_logit_processor": "They would run on the server.",
    "custom_params": "They are for processors of logits, which would run on the server.",
    "documents": "Put them into a message.",
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "web_search_options": _NOT_HERE,
    "audio": _ONLY_TEXT,
    "mm_processor_kwargs": _ONLY_TEXT,
    "lora_path": "Ask for an adapter by its name, as model.",
    "lora_request": "Ask for an adapter by its name, as model.",
    "min_length": "Use min_tokens.",
    "max_length": "Use max_tokens.",
    "n_predict": "Use max_tokens.",
    "typical_p": _OTHER_SAMPLER,
    "tfs_z": _OTHER_SAMPLER,
    "top_a": _OTHER_SAMPLER,
    "mirostat": _OTHER_SAMPLER,
    "dry_multiplier": _OTHER_SAMPLER,
    "xtc_probability": _OTHER_SAMPLER,
    "dynatemp_range": _OTHER_SAMPLER,
    "json_schema": "Use response_format.",
    "structural_tag": "Use response_format.",
    "guided_whitespace_pattern": "Use a grammar.",
    "container": _NOT_HERE,
    "mcp_servers": _NOT_HERE,
    "context_management": "Send the messages that are to be read.",
    "conversation": "Use previous_response_id, or send the items.",
    "prompt": "Send messages, or input.",
    "moderation": _NOT_HERE,
}


def check_fields(given: Mapping[str, Any]) -> None:
    """A field that is null, false, zero or empty asks for nothing."""
    for name in REFUSED.keys() & given.keys():
        if given[name] and not (name == "context_management" and _keeps_all(given[name])):
            raise bad_request(f"{name} is not accepted. {REFUSED[name]}", param=name)


def _keeps_all(management: Any) -> bool:
    """Whether it says that nothing is to be left out, as Claude Code does of thoughts."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
