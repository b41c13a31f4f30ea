"""LLM: prompts in, answers out, and clear words for what cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from phalanx import LLM, PhalanxError, SamplingParams
from phalanx.engine.scheduler import Output
from phalanx.errors import CheckpointError, ConfigError, LayoutError, ModelError, RequestError
from phalanx.server.answer import AnswerPiece, GrowingChoice, Question
from phalanx.server.messages import NewToken

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def smol() -> Iterator[LLM]:
    with LLM(progress=False, max_num_batched_tokens=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, progress=False, max_num_seqs=4, num_blocks=64, max_model_len=128) as llm:
        yield llm


def books_balance(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    return not scheduler.requests and not scheduler.in_flight and scheduler.pool.available == scheduler.pool.num_blocks


def test_the_default_model_answers_in_english(smol: LLM) -> None:
    answer = smol.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_a_prompt_is_text_or_token_ids(smol: LLM) -> None:
    assert smol.tokenizer is not None
    ids = smol.tokenizer.encode("The sun rises in the")
    as_text, as_ids = smol.generate("The sun rises in the", GREEDY), smol.generate(ids, GREEDY)
    assert as_text.token_ids == as_ids.token_ids
    assert as_text.prompt_token_ids == ids
    assert as_text.text == smol.tokenizer.decode(as_text.token_ids)


def test_a_list_of_prompts_gives_a_list_in_order(smol: LLM) -> None:
    prompts = ["One, two, three,", "The capital of Italy is", "Water boils at"]
    together = smol.generate(prompts, GREEDY)
    assert [answer.text for answer in together] == [smol.generate(prompt, GREEDY).text for prompt in prompts]
    assert smol.generate([], GREEDY) == []


def test_several_conversations_at_once(smol: LLM) -> None:
    conversations = [[{"role": "user", "content": f"Say {word}."}] for word in ("yes", "no")]
    assert len(smol.chat(conversations, GREEDY)) == 2


def test_each_prompt_may_have_its_own_parameters(tiny: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (1, 5, 9)]
    answers = tiny.generate([[1, 2], [3], [4, 5, 6]], params)
    assert [len(answer.token_ids) for answer in answers] == [1, 5, 9]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        tiny.generate([[1, 2]], params[:2])


def test_n_answers_share_the_prompt_and_differ(tiny: LLM) -> None:
    prompt = list(range(40))
    answer = tiny.generate(prompt, SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=12))
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    assert answer.token_ids == answer.choices[0].token_ids
    assert [choice.cached_tokens for choice in tiny.generate(prompt, SamplingParams(n=2)).choices] == [32, 32]


def test_the_largest_seed_has_successors(tiny: LLM) -> None:
    assert len(tiny.generate([1, 2], SamplingParams(seed=2**63 - 1, n=3, max_tokens=2)).choices) == 3


def test_a_seed_fixes_the_answer_whoever_shares_the_batch(tiny: LLM) -> None:
    seeded = SamplingParams(seed=11, temperature=1.2, top_p=0.95, max_tokens=32)
    noise = SamplingParams(temperature=1.5, max_tokens=20)
    alone = tiny.generate([5, 6, 7], seeded).token_ids
    crowded = tiny.generate([[9] * 30, [5, 6, 7], [8, 8]], [noise, seeded, noise])[1].token_ids
    assert crowded == alone
    assert tiny.generate([5, 6, 7], SamplingParams(seed=12, temperature=1.2, max_tokens=32)).token_ids != alone


def test_without_a_seed_answers_vary(tiny: LLM) -> None:
    free = SamplingParams(temperature=1.5, max_tokens=16)
    assert tiny.generate([5, 6, 7], free).token_ids != tiny.generate([5, 6, 7], free).token_ids


def test_a_stop_string_ends_the_text_before_it(smol: LLM) -> None:
    whole = smol.generate("The capital of France is", GREEDY)
    stop = whole.text[9:14]
    cut = smol.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=24, stop=["@@", stop]))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(whole.token_ids)
    assert books_balance(smol)


def test_a_stream_tells_the_same_text_in_pieces(smol: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop=["."])
    prompt = smol.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    pieces = list(smol.stream(prompt, params))
    assert len(pieces) > 3
    assert "".join(pieces) == smol.generate(prompt, params).text == "The capital of France is Paris"
    assert books_balance(smol)


def test_a_stream_may_be_left_and_may_share_the_engine(smol: LLM) -> None:
    alone = smol.generate("The moon is", GREEDY).text
    stream = smol.stream("The moon is", GREEDY)
    first = next(stream)
    assert smol.generate("One, two,", GREEDY).text
    assert first + "".join(stream) == alone
    with pytest.raises(RequestError, match="no tokens"):
        smol.stream([], GREEDY)
    left = smol.stream("The moon is", GREEDY)
    next(left)
    left.close()
    assert books_balance(smol)


def test_a_stop_token_ends_the_answer(tiny: LLM) -> None:
    free = tiny.generate([1, 2, 3], GREEDY).token_ids
    stop = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[free[4]])
    assert tiny.generate([1, 2, 3], stop).token_ids == free[: free.index(free[4]) + 1]


ENDINGS = {
    "the model's end": ({}, "The capital of France is Paris.", "stop"),
    "a stop token that is a word": ({"stop_token_ids": [7042]}, "The capital of France is", "stop"),
    "a stop string": ({"stop": ["France"]}, "The capital of ", "stop"),
    "a stop string across tokens": ({"stop": ["tal of F"]}, "The capi", "stop"),
    "no room": ({"max_tokens": 4}, "The capital of France", "length"),
    "an end token ignored": ({"ignore_eos": True, "max_tokens": 8}, "The capital of France is Paris.", "length"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_server_makes_the_same_answer_of_the_same_tokens(
    smol: LLM, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smol.tokenizer is not None
    options, text, reason = ENDINGS[ending]
    params = msgspec.structs.replace(GREEDY, **options)
    ends = sorted(smol.engine.scheduler.eos_token_ids)
    served, piece = GrowingChoice(0, Question([1], params), smol.tokenizer, ends), AnswerPiece(0)
    step = smol.engine.step

    def tapped() -> list[Output]:
        outputs = step()
        for output in outputs:
            served.add(NewToken(0, output.token, output.finish_reason, 0, 0.0), piece)
        return outputs

    monkeypatch.setattr(smol.engine, "step", tapped)
    answer = smol.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert (answer.text, answer.finish_reason) == (piece.content, served.finish_reason) == (text, reason)


def test_min_tokens_puts_the_end_off(smol: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    longer = SamplingParams(temperature=0, max_tokens=30, min_tokens=20)
    answer = smol.chat(question, longer)
    assert len(answer.token_ids) >= 20
    assert answer.text.startswith("The capital of France is Paris.")


def test_logprobs_come_with_every_token(tiny: LLM) -> None:
    answer = tiny.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 6
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(logprobs.top) == 3
        assert logprobs.top[0] == (token, logprobs.sampled)
        assert logprobs.sampled < 0
    assert tiny.generate([1, 2, 3], GREEDY).logprobs is None


BAD_PROMPTS: list[tuple[Any, str, str]] = [
    ([], "empty_prompt", "no tokens"),
    ([1] * 128, "prompt_too_long", "128 tokens, the context is 128"),
    ([1, 512], "token_out_of_range", "512 at index 1; the vocabulary has 512"),
    ([-1], "token_out_of_range", "-1 at index 0"),
]


@pytest.mark.parametrize(("prompt", "code", "words"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_others_are_served(tiny: LLM, prompt: Any, code: str, words: str) -> None:
    running = tiny.engine.add([1, 2, 3], GREEDY)
    tiny.engine.step()
    with pytest.raises(RequestError, match=words) as caught:
        tiny.engine.add(prompt, GREEDY)
    assert caught.value.code == code
    with pytest.raises(RequestError):
        tiny.generate([[1, 2], prompt], GREEDY)
    while tiny.engine.has_work:
        tiny.engine.step()
    assert running.output == tiny.generate([1, 2, 3], GREEDY).token_ids
    assert books_balance(tiny)


def test_bad_parameters_are_refused_when_they_are_made() -> None:
    with pytest.raises(RequestError, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))


def test_an_interrupted_batch_leaves_nothing_behind(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    step = tiny.engine.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(tiny.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate([[1, 2, 3], [4, 5]], GREEDY)
    monkeypatch.undo()
    assert tiny.generate([1, 2, 3], GREEDY).finish_reason == "length"
    assert books_balance(tiny)


def test_a_folder_without_a_tokenizer_takes_token_ids_only(tiny: LLM) -> None:
    assert tiny.generate([1, 2, 3], GREEDY).text == ""
    for attempt in (
        lambda: tiny.generate("text", GREEDY),
        lambda: tiny.chat([{"role": "user", "content": "hello"}]),
        lambda: tiny.generate([1], SamplingParams(stop=["x"])),
    ):
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            attempt()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_llama: Path, tmp_path: Path, tp: int) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*layers\.2\.mlp\.up_proj"):
        LLM(broken, tp=tp, progress=False)


def test_a_misshapen_tensor_is_refused_with_both_shapes(tiny_llama: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(tiny_llama, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"intermediate_size": 224}))
    with pytest.raises(CheckpointError, match=r"\[208, 144\].*\[224, 144\]"):
        LLM(wrong, progress=False)


def test_what_cannot_be_started_is_refused_before_weights_load(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="TP=10, but the model has 9 query heads"):
        LLM(tiny_llama, tp=10, progress=False)
    with pytest.raises(ConfigError, match="max_model_len is 1024, but the model was made for 512"):
        LLM(tiny_llama, max_model_len=1024, progress=False)
    with pytest.raises(ConfigError, match="holds 32 tokens, but one sequence may have 64"):
        LLM(tiny_llama, max_model_len=64, num_blocks=2, progress=False)
    with pytest.raises(ConfigError, match=r"max_sequences.*Options are"):
        LLM(tiny_llama, max_sequences=3, progress=False)
    with pytest.raises(ConfigError, match="dtype is 'fp64'"):
        LLM(tiny_llama, dtype="fp64", progress=False)
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(ModelError, match="mamba2"):
        LLM(tmp_path, progress=False)
    with pytest.raises(PhalanxError, match="no/such/folder"):
        LLM("no/such/folder", progress=False)


def test_random_weights_need_only_a_config(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    with LLM(tmp_path, load_format="dummy", progress=False) as llm:
        assert len(llm.generate([1, 2, 3], GREEDY).token_ids) == 24
