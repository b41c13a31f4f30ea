"""Layers with windows and with recurrent states: what is kept of them, found again, and given back."""

from __future__ import annotations

import random

import pytest

from phalanx.engine.caches import TRIMMED

from .books import VOCAB, check_answer, check_empty, greedy, held, make_engine, run


@pytest.mark.parametrize("depth", [1, 2])
def test_a_window_keeps_what_is_in_reach_and_no_more(depth: int) -> None:
    engine, _ = make_engine(windows=(8,), max_model_len=200, num_blocks=120, budget=32, depth=depth)
    request = engine.add([1, 2, 3] * 40, greedy(40))
    most = 0
    while engine.has_work:
        engine.step()
        if request.windows and not request.rest > 1:
            most = max(most, sum(block != TRIMMED for block in request.windows[0]))
    assert 2 <= most <= 8 // 4 + 2
    check_answer(request, 200)
    check_empty(engine.scheduler)


def test_what_windows_give_up_lets_more_requests_run() -> None:
    """Each holds 16 blocks for all its tokens; with a window of 8 tokens, another 3 instead of another 16."""
    engine, _ = make_engine(windows=(8,), max_model_len=64, num_blocks=84, budget=64, prefix_caching=False)
    requests = [engine.add([number + 1] * 48, greedy(16)) for number in range(4)]
    seen = 0
    while engine.has_work:
        engine.step()
        seen = max(seen, len(engine.scheduler.running))
    assert seen == 4
    for request in requests:
        check_answer(request, 64)


def test_a_prompt_longer_than_the_blocks_of_its_windows_runs() -> None:
    """30 blocks for all its tokens and 10 for a window of 8: its chunks of 16 take them and give them back."""
    engine, _ = make_engine(windows=(8,), max_model_len=120, num_blocks=40, budget=16)
    request = engine.add([1, 2, 3] * 37, greedy(9))
    run(engine)
    check_answer(request, 120)
    check_empty(engine.scheduler)


def test_chunks_are_as_long_as_windows_have_blocks_for() -> None:
    """28 of 33 blocks are for all tokens."""
    engine, runner = make_engine(windows=(5,), max_model_len=120, num_blocks=33, budget=64)
    request = engine.add([1, 2, 3] * 37, greedy(9))
    run(engine)
    check_answer(request, 120)
    assert max(plan.num_tokens for plan in runner.plans) == 20
    assert len(runner.plans) < 111


@pytest.mark.parametrize("token_blocks", [0, 64])
def test_a_prompt_without_blocks_waits_for_those_before_it_and_drives_out_those_behind(token_blocks: int) -> None:
    engine, _ = make_engine(
        windows=(9,), token_blocks=token_blocks, max_model_len=64, num_blocks=10 + 30 * (not token_blocks), budget=12
    )
    requests = [engine.add([number, 2, 3] * 15, greedy(12)) for number in range(1, 5)]
    run(engine)
    for request in requests:
        check_answer(request, 64)
    assert [request.preemptions for request in requests] == sorted(request.preemptions for request in requests)
    check_empty(engine.scheduler)


@pytest.mark.parametrize(("num_blocks", "length"), [(29, 6), (30, 12), (31, 15)])
def test_two_prompts_do_not_wait_for_each_others_blocks(num_blocks: int, length: int) -> None:
    """Short ones pass a long one until no block is left for the window of either: the long one came first."""
    engine, _ = make_engine(windows=(9,), max_model_len=104, num_blocks=num_blocks, budget=16)
    requests = [engine.add([1, 2, 3] * 32, greedy(4))]
    engine.step()
    requests += [engine.add([2, 3, number] * (length // 3), greedy(3)) for number in (4, 5)]
    for _ in range(200):
        engine.step()
    for request in requests:
        check_answer(request, 104)
    check_empty(engine.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_where_every_layer_has_a_window_blocks_behind_it_are_free(depth: int) -> None:
    """Token ids alone are kept of 120 tokens; six sequences live with four blocks each, one with a chunk more."""
    engine, _ = make_engine(
        windows=(8,), token_blocks=180, max_model_len=120, num_blocks=28, budget=16, max_num_seqs=6, depth=depth
    )
    requests = [engine.add([number, 2, 3] * 20, greedy(50, seed=number)) for number in range(1, 7)]
    together = 0
    while engine.has_work:
        engine.step()
        together = max(together, len(engine.scheduler.ready))
    assert together == 6
    for request in requests:
        check_answer(request, 120)
        assert not request.preemptions
    check_empty(engine.scheduler)


def test_where_every_layer_has_a_window_a_prefix_is_found_whose_window_is_kept() -> None:
    engine, _ = make_engine(windows=(8,), token_blocks=64, max_model_len=128, num_blocks=9, budget=16)
    prompt = [1, 2, 3, 4, 5] * 12
    engine.add(prompt, greedy(1))
    run(engine)
    again = engine.add([*prompt, 6], greedy(4))
    run(engine)
    assert again.cached_tokens == 60
    check_answer(again, 128)
    parted = engine.add([*prompt[:12], 6, 6], greedy(4))
    run(engine)
    assert parted.cached_tokens == 0, "of its beginning only token ids are known: the blocks have gone round since"
    check_answer(parted, 128)
    check_empty(engine.scheduler)


@pytest.mark.parametrize("windows", [(8,), (8, 20)])
def test_a_prefix_is_resumed_behind_the_longest_part_whose_windows_are_kept(windows: tuple[int, ...]) -> None:
    engine, _ = make_engine(windows=windows, max_model_len=128, num_blocks=200, budget=128)
    prompt = [1, 2, 3, 4, 5] * 12
    engine.add(prompt, greedy(1))
    run(engine)
    again = engine.add([*prompt, 6], greedy(4))
    run(engine)
    assert again.cached_tokens == 60
    check_answer(again, 128)


def test_a_window_that_is_gone_is_computed_again() -> None:
    """The last blocks of the window are evicted, those of the full layers are not: nothing can be resumed there."""
    engine, _ = make_engine(windows=(8,), max_model_len=64, num_blocks=64, budget=64)
    first = engine.add([1, 2, 3, 4] * 8, greedy(1))
    run(engine)
    cache = engine.scheduler.pool.cache
    assert cache is not None
    _, nodes = cache.match([1, 2, 3, 4] * 8, None)
    block = cache.window(nodes[-1], 0)
    assert block is not None
    cache.forget(block)
    del engine.scheduler.pool._idle[block]
    engine.scheduler.pool._free.append(block)
    again = engine.add([*[1, 2, 3, 4] * 8, 5], greedy(3))
    run(engine)
    assert again.cached_tokens is not None
    assert again.cached_tokens < 32
    assert first.finish_reason == "length"
    check_answer(again, 64)


def test_a_conversation_goes_on_behind_its_last_turn() -> None:
    """Twenty turns of an agent, each with all before it: at least nine tenths are not computed again."""
    engine, _ = make_engine(snapshots=8, max_model_len=2048, num_blocks=600, block_size=16, budget=256, max_num_seqs=2)
    rng = random.Random(0)
    text = [rng.randrange(1, VOCAB) for _ in range(300)]
    for turn in range(20):
        request = engine.add(text, greedy(30, seed=turn))
        run(engine)
        check_answer(request, 2048)
        text = request.tokens + [rng.randrange(1, VOCAB) for _ in range(40)]
    scheduler = engine.scheduler
    assert scheduler.prefix_hits / scheduler.prefix_queries > 0.9
    check_empty(scheduler)


def test_while_it_decodes_a_request_keeps_one_copy_of_its_state() -> None:
    """One behind its prompt, and one that moves along: the next turn needs no other."""
    engine, _ = make_engine(snapshots=20, max_model_len=128, num_blocks=64)
    request = engine.add([1, 2, 3, 4, 5, 6] * 3, greedy(60))
    run(engine)
    assert len(engine.scheduler.caches.snapshots) == 2
    again = engine.add([*request.tokens, 1], greedy(1))
    run(engine)
    assert again.cached_tokens == 76


def test_prompts_that_only_share_their_beginning_resume_where_they_part() -> None:
    """The second one computes the shared part again, but leaves a state behind it for the third."""
    engine, _ = make_engine(snapshots=8, max_model_len=256, num_blocks=200, budget=256)
    shared = [1, 2, 3, 4, 5, 6, 1, 3] * 8
    requests = []
    for number in range(3):
        requests.append(engine.add(shared + [number + 2] * 9, greedy(3)))
        run(engine)
        check_answer(requests[-1], 256)
    assert [request.cached_tokens for request in requests] == [0, 0, 64]


def test_a_state_that_this_step_leaves_is_not_read_in_it() -> None:
    engine, runner = make_engine(snapshots=8, max_model_len=64, num_blocks=64, budget=64)
    first, second = (engine.add([1, 2, 3, 4, 5, 6, 1, 2, 3], greedy(2)) for _ in range(2))
    run(engine)
    assert runner.plans[0].saved
    assert not runner.plans[0].restored
    for request in (first, second):
        check_answer(request, 64)


@pytest.mark.parametrize("snapshots", [0, 1, 3])
def test_with_few_places_or_none_answers_stay_right(snapshots: int) -> None:
    engine, _ = make_engine(snapshots=snapshots, max_model_len=96, num_blocks=40, budget=24, depth=2)
    requests = [engine.add([1, 2, 3, 4] * (2 + number % 4) + [number % 5], greedy(20)) for number in range(12)]
    run(engine)
    for request in requests:
        check_answer(request, 96)
        assert not held(request)
    check_empty(engine.scheduler)
